"""Texts that a model reads for its calibration, or the training of gates: a file in pieces, or problems."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks.reasoner.problems import Problem
from benchmarks.reasoner.tasks import OF_PACKAGE, TASKS, make_problem
from kvllm.config import require
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.tokenizer import load_tokenizer

SEED = 7
"""Of the problems: other ones than those that the scripts about answers ask."""
ALL = "all"
"""Tasks, one after the other: those of the package's model."""
SMALLEST = 1 / 3
"""Of a task's largest size."""


@dataclass(frozen=True)
class Text:
    """num_prompt: the first tokens, which were asked and not written by the model."""

    token_ids: list[int]
    num_prompt: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, default=Path(DEFAULT_MODEL), metavar="DIR", help="default: the model of the package")
    add("--text", type=Path, metavar="FILE", help="default, for the model of the package: its problems")
    add("--task", choices=(ALL, *TASKS), help="problems of one task, or of all that the package's model knows, in turn")
    add("--seed", type=int, default=SEED, help=f"seed of problems (default {SEED})")
    add("--length", type=int, default=2048, metavar="N", help="most tokens of a text (default 2048)")


def check_arguments(args: argparse.Namespace, shortest: int) -> None:
    """shortest: texts must have more tokens."""
    require(args.length > shortest, "--length", args.length, f"more than {shortest}")
    require(not (args.text and args.task), "--text", args.text, "without --task")
    given = args.text or args.task or args.model == Path(DEFAULT_MODEL)
    require(bool(given), "--text", args.text, "a file, for a model that is not the package's")
    require(args.text is None or args.text.is_file(), "--text", args.text, "an existing file")


def read_texts(args: argparse.Namespace, shortest: int) -> Iterator[Text]:
    """The file in pieces of `--length` tokens, or problems with their workings without end.

    shortest: a piece has more tokens.
    """
    encode = load_tokenizer(str(args.model)).encode
    if args.text is None:
        for index in count():
            problem = draw_problem(args, index)
            token_ids = encode(problem.prompt + problem.working)[: args.length]
            yield Text(token_ids, min(len(encode(problem.prompt)), len(token_ids)))
        return
    token_ids = encode(args.text.read_text())
    starts = range(0, len(token_ids) - shortest, args.length)
    require(bool(starts), "--text", args.text, f"a text of more than {shortest} tokens")
    yield from (Text(token_ids[start : start + args.length]) for start in starts)


def draw_problem(args: argparse.Namespace, index: int) -> Problem:
    name = _one_task(args) or OF_PACKAGE[index % len(OF_PACKAGE)]
    task, rng = TASKS[name], random.Random(f"calibration/{args.seed}/{index}")
    smallest = max(task.smallest, round(SMALLEST * task.largest))
    return make_problem(rng, rng.randint(smallest, task.largest), name)


def describe(args: argparse.Namespace) -> str:
    return args.text.name if args.text else f"problems of the reasoner: {_one_task(args) or 'all tasks'}"


def _one_task(args: argparse.Namespace) -> str | None:
    """None: all tasks of the package's model."""
    return None if args.task == ALL else args.task
