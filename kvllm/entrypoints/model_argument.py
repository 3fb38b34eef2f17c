"""The model of a command: an argument, or the option --model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any


def add_model_argument(
    parser: argparse.ArgumentParser,
    help: str,
    *,
    metavar: str = "MODEL",
    type: Callable[[str], Any] = str,
    also: Sequence[str] = (),
) -> None:
    """Add both; None where neither is given. also: other names of the option, as other programs have them."""
    options: dict[str, Any] = {"action": _Once, "type": type, "metavar": metavar}
    parser.add_argument("model", nargs="?", help=help, **options)
    parser.add_argument("--model", *also, dest="model", help="the same", **options)


def add_revision_argument(parser: argparse.ArgumentParser) -> None:
    help = "branch, tag or commit of a model on a hub (default: main)"
    parser.add_argument("--revision", metavar="NAME", help=help)


class _Once(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        known = getattr(namespace, self.dest, None)
        if values is None:  # the argument was left out
            return
        if known not in (None, values):
            raise argparse.ArgumentError(None, f"two models are given, {known} and {values}: leave one out")
        setattr(namespace, self.dest, values)
