"""Chat with a running server, or with a model.

    kvllm chat                     asks for messages until the end of input (Ctrl-D); /help lists commands
    kvllm chat -q "How many primes are there below 100?" --stats
    kvllm chat path/to/Qwen3-0.6B  where no server runs, one is started within the command
    kvllm chat --system-prompt "Answer in French." < question.txt

An interrupt (Ctrl-C) while the server answers ends that answer alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvllm.client import address
from kvllm.entrypoints import conversation, serve
from kvllm.entrypoints.chat_commands import ChatCommands


def add_arguments(parser: argparse.ArgumentParser) -> None:
    conversation.add_arguments(parser, "MESSAGE")
    parser.add_argument("--system-prompt", metavar="TEXT", help="the message of the system that the chat begins with")


def run(args: argparse.Namespace) -> None:
    with _server(args) as url:
        _chat(args, url)


def _chat(args: argparse.Namespace, url: str) -> None:
    from kvllm.client.connection import Connection  # its packages come with the extra `serve`

    connection = Connection(url, args.api_key)
    body = conversation.common_body(args, connection)
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []

    def answer(message: str) -> None:
        asked = [*messages, {"role": "user", "content": message}]
        chunks = connection.stream("/v1/chat/completions", body | {"messages": asked})
        text = conversation.show(chunks, with_stats=args.stats)
        messages[:] = [*asked, {"role": "assistant", "content": text}]

    conversation.answer_all(args.quick, answer, ChatCommands(messages, body["model"]))


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """The URL of the server: one that runs, or else, for a model, one within this process. Raises KvLLMError."""
    from kvllm.client.connection import Connection

    is_default = args.url == address.DEFAULT_URL
    if not (args.model and is_default) or Connection(args.url).answers():
        yield args.url
        return
    from kvllm.serving.background import background_server

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    keys = [] if args.api_key is None else ["--api-key", args.api_key]
    options = parser.parse_args([args.model, "--served-model-name", args.model, *keys])
    print(f"No server at {args.url}: loading {args.model} here", file=sys.stderr)
    with background_server(*serve.read_options(options)) as url:
        yield url
