"""The parser of the command `kvllm`: wrong usage ends with one line of usage and the nearest name."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from kvllm.spelling import did_you_mean

WRONG_USAGE = 2


class Parser(argparse.ArgumentParser):
    """Takes whole names alone: what abbreviates one option today may be another one tomorrow.

    Its subcommands have parsers of the same class.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter} | options)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - the base has overloads
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Nothing is left over: the parser of a subcommand refuses what it does not know, with its own options."""
        given = self._with_dashes(sys.argv[1:] if args is None else list(args))
        self._refuse_unknown_options(given)
        found, extras = super().parse_known_args(given, namespace)
        if extras:
            self.error(f"unexpected argument {extras[0]!r}")
        return found, extras

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USAGE, f"{self._usage_line()}\n{self.prog}: error: {message}\n")

    def _with_dashes(self, arguments: list[str]) -> list[str]:
        """Options may have the underscores that they have in Python, as vLLM's."""
        given = list(arguments)
        for index, argument in enumerate(given):
            if argument == "--":
                break
            name, equals, value = argument.partition("=")
            dashed = name.replace("_", "-")
            if name.startswith("--") and dashed in self._option_string_actions:
                given[index] = f"{dashed}{equals}{value}"
        return given

    def _refuse_unknown_options(self, arguments: Iterable[str]) -> None:
        """Before anything else is missed: a mistyped option that is required would be told to be missing."""
        for argument in arguments:
            if argument == "--" or (self._subparsers is not None and not argument.startswith("-")):
                return  # what comes now is text, or the subcommand's
            name = argument.partition("=")[0]
            if re.fullmatch(r"--\w[\w-]*", name) and name not in self._option_string_actions:
                near = did_you_mean(name, self._option_string_actions)
                self.error(f"unknown option {name}{near or f'; {self.prog} --help lists the options'}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        near = did_you_mean(str(value), names) or f"; choose one of {', '.join(names)}"
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"unknown command {value!r}{near}")
        raise argparse.ArgumentError(action, f"{value!r} is not allowed{near}")

    def _usage_line(self) -> str:
        """With the arguments and what is required; `--help` has the rest."""
        formatter = self._get_formatter()
        needed = [action for action in self._actions if action.required or not action.option_strings]
        formatter.add_usage(None, needed, [])
        return formatter.format_help().strip() + ("" if self._subparsers else " [OPTION ...]")
