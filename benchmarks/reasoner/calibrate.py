"""`kvllm calibrate` on the reasoner's problems with their workings, a piece for each.

    python -m benchmarks.reasoner.calibrate --layer-losses
    python -m benchmarks.reasoner.calibrate --layer-losses --model benchmarks/reasoner/earlier --task program

Windows begin after the prompts, and problems that are too short for one tell no losses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import command_line
from benchmarks.reasoner.tasks import TASKS, make_problem
from benchmarks.reasoner.tokenizer import encode
from kvllm.calibration.files import calibrate
from kvllm.calibration.layer_losses import Windows
from kvllm.comparison.texts import Text
from kvllm.engine_args import DEFAULT_MODEL

SEED, LENGTH = 7, 2048
"""Of the problems, other ones than those that the scripts about answers ask; most tokens of a text."""
SMALLEST = 1 / 3
"""Of a task's largest size."""


def draw_text(task: str, index: int) -> Text:
    rng, largest = random.Random(f"calibration/{SEED}/{index}"), TASKS[task].largest
    smallest = max(TASKS[task].smallest, round(SMALLEST * largest))
    problem = make_problem(rng, rng.randint(smallest, largest), task)
    prompt = encode(problem.prompt)[:LENGTH]
    return Text("", prompt, encode(problem.working)[: LENGTH - len(prompt)])


def run_calibration(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.reasoner.calibrate", __doc__)
    add = parser.add_argument
    add("--model", type=Path, default=DEFAULT_MODEL, metavar="DIR", help="default: the model of the package")
    add("--task", choices=TASKS, help="problems of one task (default: of all, in turn)")
    add("--pieces", type=int, default=64, metavar="N", help="problems (default 64)")
    add("--layer-losses", action="store_true", help="measure what each layer loses, too")
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "pieces")
    texts = [draw_text(args.task or [*TASKS][index % len(TASKS)], index) for index in range(args.pieces)]
    name = f"problems of the reasoner: {args.task or 'all tasks'}"
    for path in calibrate(args.model, texts, name, Windows() if args.layer_losses else None):
        print(f"Written: {path}")


if __name__ == "__main__":
    command_line.run_script(run_calibration)
