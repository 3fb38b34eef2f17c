"""Print a script that completes kvllm's commands and options in a shell.

source <(kvllm completion bash)                                          this bash
kvllm completion bash > ~/.local/share/bash-completion/completions/kvllm every bash
kvllm completion zsh > ~/.zfunc/_kvllm                                   zsh, with ~/.zfunc in fpath
kvllm completion fish > ~/.config/fish/completions/kvllm.fish            fish
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> None:
    import shtab  # comes with the extra `serve`

    for action in _options(args.of_all):
        if action.type is Path:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    print(shtab.complete(args.of_all, args.shell))


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options of a parser and of all its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)
