"""Run scenarios of one seed after the other, and shrink the first that fails.

python -m tests.deterministic --seconds 600 --first-seed 0
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time

from tests.deterministic.scenario import draw
from tests.deterministic.shrink import as_test, shrink
from tests.deterministic.world import run

DESCRIPTION = "Run scenarios of one seed after the other, and make the first that fails short."


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.deterministic",
        description="Run scenarios of one seed after the other, and shrink the first that fails.",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for which new scenarios begin (default 60)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="(default 0)")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    begin, steps = time.perf_counter(), 0
    for seed in itertools.count(args.first_seed):
        seconds = time.perf_counter() - begin
        if seconds > args.seconds:
            print(f"seeds {args.first_seed} to {seed - 1}: {steps} steps, {steps / seconds:.0f} a second, no failure")
            return 0
        outcome = run(draw(seed))
        steps += outcome.steps
        if outcome.failure:
            print(f"seed {seed}: {outcome.failure}\nIt is being made shorter", flush=True)
            print(as_test(shrink(draw(seed), lambda scenario: run(scenario).failure is not None)))
            return 1
    raise AssertionError


if __name__ == "__main__":
    sys.exit(main())
