"""The `kvllm` command: one subcommand for each module in COMMANDS."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from kvllm.entrypoints import serve, simulate
from kvllm.errors import KvLLMError


class Command(Protocol):
    """A module with a subcommand. Its docstring is the help text, of which the first line appears in the overview."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> None: ...


COMMANDS: dict[str, Command] = {"serve": serve, "simulate": simulate}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvllm", description="Serve language models whose KV cache does not fit.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        text = command.__doc__ or ""
        subparser = subparsers.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(arguments)
    try:
        COMMANDS[args.command].run(args)
    except KvLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
