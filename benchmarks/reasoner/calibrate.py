"""`kvllm calibrate` on the reasoner's problems with their workings, a piece for each.

    python -m benchmarks.reasoner.calibrate --layer-losses
    python -m benchmarks.reasoner.calibrate --layer-losses --model benchmarks/reasoner/earlier --task program

Windows begin behind the prompts, and problems that are too short for one tell no losses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import command_line
from benchmarks.reasoner.problems import Problem
from benchmarks.reasoner.tasks import TASKS, make_problem
from benchmarks.reasoner.tokenizer import encode
from kvllm.calibration.files import calibrate
from kvllm.calibration.layer_losses import Windows
from kvllm.comparison.texts import Text
from kvllm.engine_args import DEFAULT_MODEL

SEED = 7
"""Of the problems: other ones than those that the scripts about answers ask."""
SMALLEST = 1 / 3
"""Of a task's largest size."""


def draw_problem(task: str | None, seed: int, index: int) -> Problem:
    """task: None stands for all, in turn."""
    name = task or [*TASKS][index % len(TASKS)]
    rng, largest = random.Random(f"calibration/{seed}/{index}"), TASKS[name].largest
    smallest = max(TASKS[name].smallest, round(SMALLEST * largest))
    return make_problem(rng, rng.randint(smallest, largest), name)


def run_calibration(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.reasoner.calibrate", __doc__)
    add = parser.add_argument
    add("--model", type=Path, default=DEFAULT_MODEL, metavar="DIR", help="default: the model of the package")
    add("--task", choices=TASKS, help="problems of one task (default: of all, in turn)")
    add("--seed", type=int, default=SEED, help=f"seed of problems (default {SEED})")
    add("--length", type=int, default=2048, metavar="N", help="most tokens of a text (default 2048)")
    add("--pieces", type=int, default=64, metavar="N", help="problems (default 64)")
    add("--layer-losses", action="store_true", help="measure what each layer loses, too")
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "pieces", "length")
    problems = [draw_problem(args.task, args.seed, index) for index in range(args.pieces)]
    texts = []
    for problem in problems:
        prompt = encode(problem.prompt)[: args.length]
        texts.append(Text("", prompt, encode(problem.working)[: args.length - len(prompt)]))
    name = f"problems of the reasoner: {args.task or 'all tasks'}"
    for path in calibrate(args.model, texts, name, Windows() if args.layer_losses else None):
        print(f"Written: {path}")


if __name__ == "__main__":
    command_line.run_script(run_calibration)
