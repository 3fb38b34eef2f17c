"""The `kvllm` command: one subcommand for each module in COMMANDS.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from kvllm import __version__
from kvllm.entrypoints import (
    bench,
    calibrate,
    chat,
    compare,
    complete,
    completion,
    list_models,
    plan,
    pull,
    rm,
    run_batch,
    serve,
    simulate,
    top,
)
from kvllm.entrypoints.parser import WRONG_USAGE, Parser
from kvllm.errors import ConfigError, KvLLMError

FAILED, INTERRUPTED = 1, 130


class Command(Protocol):
    """A module with a subcommand. Its docstring is the help text, of which the first line appears in the overview."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> None: ...


COMMANDS: dict[str, Command] = {
    "serve": serve,
    "chat": chat,
    "complete": complete,
    "bench": bench,
    "top": top,
    "pull": pull,
    "list": list_models,
    "rm": rm,
    "run-batch": run_batch,
    "compare": compare,
    "calibrate": calibrate,
    "plan": plan,
    "simulate": simulate,
    "completion": completion,
}


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="kvllm", description="Serve language models whose KV cache does not fit.")
    parser.add_argument("--version", action="version", version=f"kvllm {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        text = command.__doc__ or ""
        command.add_arguments(subparsers.add_parser(name, help=text.splitlines()[0], description=text))
    parser.set_defaults(of_all=parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(arguments)
    try:
        COMMANDS[args.command].run(args)
    except KvLLMError as error:
        _fail(f"error: {error}", WRONG_USAGE if isinstance(error, ConfigError) else FAILED)
    except ModuleNotFoundError as error:
        if (error.name or "kvllm").partition(".")[0] == "kvllm":
            raise
        _fail(f"error: kvllm {args.command} needs the package {error.name}: pip install 'kvllm[serve]'", FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # whoever read the output has ended; Python would complain again when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"error: {error.filename}: {error.strerror}", FAILED)


def _fail(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
