"""The parts that `kvllm chat` and `kvllm complete` share: options, where prompts come from, answers as they grow."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvllm.client import address
from kvllm.client.events import Choice, Chunk, Usage
from kvllm.entrypoints.chat_commands import HINT, ChatCommands
from kvllm.entrypoints.model_argument import add_model_argument
from kvllm.entrypoints.settings import parse_request_compression
from kvllm.errors import ConfigError, ServerError

if TYPE_CHECKING:
    from kvllm.client.connection import Connection

THOUGHT_BEGIN, THOUGHT_END = "<think>\n", "\n</think>\n"


def add_arguments(parser: argparse.ArgumentParser, prompt: str) -> None:
    """Add the options of both commands. prompt: what one of its inputs is called."""
    address.add_arguments(parser)
    add = parser.add_argument
    text = "name of the model (default: the first that the server lists)"
    add_model_argument(parser, text, also=["--model-name"])
    add("-q", "--quick", metavar=prompt, help="one prompt; ends after its answer")
    add("--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: the server's)")
    add("--temperature", type=float, metavar="T", help="default: the server's; 0 is greedy")
    settings = "compression settings of the request, as far as the server allows them"
    add("--compression", default="", metavar="KEY=VALUE,...|JSON", help=settings)
    add("--stats", action="store_true", help="print the time to the first token, and tokens per second")


def common_body(args: argparse.Namespace, connection: Connection) -> dict[str, Any]:
    """The fields of every request that the options fix."""
    body: dict[str, Any] = {}
    if args.compression:
        body["compression"] = parse_request_compression(args.compression)
    body["model"] = args.model or connection.first_model()
    if args.stats:
        body["stream_options"] = {"include_usage": True}
    if args.max_tokens is not None:
        body["max_tokens"] = args.max_tokens
    if args.temperature is not None:
        body["temperature"] = args.temperature
    return body


def answer_all(quick: str | None, answer: Callable[[str], None], commands: ChatCommands | None = None) -> None:
    """Answer the one prompt given, or all of standard input as one prompt, or what is typed, line by line.

    At a terminal, a failed request is reported and the next prompt asked for. commands: what can be typed there beside
    prompts.
    """
    if quick is not None:
        answer(quick)
    elif not sys.stdin.isatty():
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input is no text in UTF-8 ({error})") from None
        if not text.strip():
            raise ConfigError("standard input is empty: give a prompt there, or with -q")
        answer(text)
    else:
        for line in _typed_lines(commands):
            try:
                commands.take(line, answer) if commands else answer(line)
            except EOFError:
                return
            except (ConfigError, ServerError) as error:
                print(f"error: {error}", file=sys.stderr)


def _typed_lines(commands: ChatCommands | None) -> Iterator[str]:
    import readline  # gives `input` its line editing

    if commands:
        print(HINT)
        commands.complete_in(readline)
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        if prompt.strip():
            yield prompt


def show(chunks: Iterator[Chunk], *, with_stats: bool) -> str:
    """Print an answer as it grows, its thoughts within tags. Returns its text without thoughts.

    At a terminal, an interrupt ends the answer, and what came of it counts.
    """
    begin = time.perf_counter()
    first, usage, printer = None, None, _Printer()
    try:
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                printer.add(choice)
            if first is None and printer.has_printed:
                first = time.perf_counter() - begin
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    except ServerError:
        printer.end()
        raise
    printer.end()
    if with_stats and usage is not None:
        _print_stats(usage, first, time.perf_counter() - begin)
    return printer.text


class _Printer:
    """Prints what an answer brings. text: its text so far, without thoughts."""

    def __init__(self) -> None:
        self.text = ""
        self.has_printed = False
        self._thinking = False

    def add(self, choice: Choice) -> None:
        if choice.delta is None:
            self._print(choice.text or "", thinking=False)
        else:
            self._print(choice.delta.thought, thinking=True)
            self._print(choice.delta.content or "", thinking=False)

    def end(self) -> None:
        if self._thinking:
            _write(THOUGHT_END)
        if self.has_printed:
            _write("\n")

    def _print(self, text: str, *, thinking: bool) -> None:
        if not text:
            return
        if thinking != self._thinking:
            _write(THOUGHT_BEGIN if thinking else THOUGHT_END)
            self._thinking = thinking
        self.has_printed = True
        self.text += "" if thinking else text
        _write(text)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_stats(usage: Usage, first: float | None, seconds: float) -> None:
    ttft = "no text" if first is None else f"TTFT: {1000 * first:.2f} ms"
    speed = usage.completion_tokens / seconds
    print(
        f"{ttft}, TPS: {speed:.2f} tokens/s ({usage.prompt_tokens} prompt tokens, {usage.completion_tokens} tokens "
        f"in {seconds:.2f} s)",
        file=sys.stderr,
    )
