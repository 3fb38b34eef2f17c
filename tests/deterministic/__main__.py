"""Run scenarios of one seed after the other, and shrink the first that fails.

python -m tests.deterministic --seconds 600 --first-seed 0 --processes 2
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import sys
import time

from tests.deterministic.scenario import draw
from tests.deterministic.shrink import as_test, shrink
from tests.deterministic.world import run


def search(order: tuple[int, int, float]) -> tuple[int, int, str | None]:
    """Run every so many-th scenario from a first one on, for so many seconds or until one fails. Returns the last seed,
    the steps of all, and what has failed."""
    first, stride, seconds = order
    logging.disable(logging.CRITICAL)
    end, steps = time.perf_counter() + seconds, 0
    for seed in itertools.count(first, stride):
        outcome = run(draw(seed))
        steps += outcome.steps
        if outcome.failure or time.perf_counter() > end:
            return seed, steps, outcome.failure
    raise AssertionError


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.deterministic",
        description="Run scenarios of one seed after the other, and shrink the first that fails.",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for which new scenarios begin (default 60)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="(default 0)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that share the seeds (default 1)")
    args = parser.parse_args()
    begin, steps, first, count = time.perf_counter(), 0, args.first_seed, args.processes
    with multiprocessing.Pool(count) as pool:
        orders = [(first + i, count, args.seconds) for i in range(count)]
        for seed, part, failure in pool.imap_unordered(search, orders):
            steps += part
            if failure:
                print(f"seed {seed}: {failure}\nIt is being made shorter", flush=True)
                print(as_test(shrink(draw(seed), lambda scenario: run(scenario).failure is not None)))
                return 1
    seconds = time.perf_counter() - begin
    print(f"seeds from {first} on: {steps} steps, {steps / seconds:.0f} a second, no failure")
    return 0


if __name__ == "__main__":
    sys.exit(main())
