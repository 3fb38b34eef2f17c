"""The settings of Kara or `kara_sharp`, one at a time around a middle: which would you ship?

    python -m benchmarks.quality.settings

Window and buffer, chunk budget (alpha) and longest chunk (gamma) of Token2Chunk, and the query stride, at one
retention, on the same questions. Windows and buffers change the memory too: compare with the entries kept. The
figures go to settings.json and a plot to settings.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common import accuracy, compressions
from benchmarks.common.trials import FULL, Trial
from kvllm.errors import KvLLMError

METHODS = ("kara", "kara_sharp")
MIDDLE = {
    "window": compressions.WINDOW,
    "buffer": compressions.BUFFER,
    "chunk_budget": 8,
    "max_chunk": 8,
    "query_stride": 1,
}
VALUES = {
    "window": (192, 256, 320, 512, 768),
    "buffer": (16, 32, 64, 192),
    "chunk_budget": (0, 16, 32),
    "max_chunk": (4, 6, 12),
    "query_stride": (2, 4, 8, 16),
}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = accuracy.make_parser("benchmarks.quality.settings", __doc__)
    parser.add_argument("--retention", default="0.2", help="default: 0.2")
    parser.add_argument("--method", choices=METHODS, default="kara", help="default: kara")
    parser.add_argument("--vary", nargs="+", choices=VALUES, default=VALUES, help="default: all")
    args = parser.parse_args(arguments)
    compressions.check_retention("--retention", args.retention)
    return args


def trials_of(args: argparse.Namespace) -> list[Trial]:
    def trial(name: str, **changed: Any) -> Trial:
        return Trial(name=name, compression=compressions.kara(args.retention, method=args.method, **(MIDDLE | changed)))

    middle = trial(f"{args.method}: " + ", ".join(f"{name} {value}" for name, value in MIDDLE.items()))
    varied = [trial(f"{name} {value}", **{name: value}) for name in args.vary for value in VALUES[name]]
    return [middle, *varied, Trial(name=FULL)]


def main() -> None:
    try:
        args = parse_arguments(sys.argv[1:])
        accuracy.run_comparison("benchmarks.quality.settings", sys.argv[1:], args, trials_of(args))
    except KvLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
