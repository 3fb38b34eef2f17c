"""The parts of a command line that all scripts have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvllm.config import require
from kvllm.errors import KvLLMError


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m module`, whose help is the module's docstring as it stands."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_output_argument(parser: argparse.ArgumentParser, folder: str = "benchmark-output") -> None:
    parser.add_argument(
        "--output", type=Path, default=Path(folder), metavar="DIR", help=f"folder of the report (default {folder})"
    )


def require_positive(args: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError if one of these arguments is given and below 1."""
    for name in names:
        value = getattr(args, name)
        require(value is None or value >= 1, f"--{name.replace('_', '-')}", value, "at least 1")


def run_script(script: Callable[[Sequence[str]], None]) -> None:
    """Call a script with the arguments of the command line. An error of the engine ends it with its message alone."""
    try:
        script(sys.argv[1:])
    except KvLLMError as error:
        sys.exit(f"error: {error}")
