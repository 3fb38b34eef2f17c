"""Right answers over the settings of Kara or `kara_sharp`, one setting at a time around a middle.

    python -m benchmarks.quality.settings

The settings are window and buffer, chunk budget (alpha) and longest chunk (gamma) of Token2Chunk.
All trials have one retention and answer the same questions. Windows and buffers change the memory too, so compare the
KV pairs that are kept. The figures go to settings.json, a plot to settings.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.common import accuracy, command_line, compressions
from benchmarks.common.trials import FULL, Trial

METHODS = ("kara", "kara_sharp")
MIDDLE = {
    "window": compressions.WINDOW,
    "buffer": compressions.BUFFER,
    "chunk_budget": 8,
    "max_chunk": 8,
}
VALUES = {
    "window": (192, 256, 320, 512, 768),
    "buffer": (16, 32, 64, 192),
    "chunk_budget": (0, 16, 32),
    "max_chunk": (4, 6, 12),
}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = accuracy.make_parser("benchmarks.quality.settings", __doc__)
    parser.add_argument("--retention", default="0.2", help="share of a window that is kept (default 0.2)")
    parser.add_argument("--method", choices=METHODS, default="kara", help="default: kara")
    parser.add_argument("--vary", nargs="+", choices=VALUES, default=VALUES, help="settings to vary (default: all)")
    args = parser.parse_args(arguments)
    compressions.check_retention("--retention", args.retention)
    return args


def trials_of(args: argparse.Namespace) -> list[Trial]:
    def trial(name: str, **changed: Any) -> Trial:
        return Trial(name=name, compression=compressions.kara(args.retention, method=args.method, **(MIDDLE | changed)))

    middle = trial(f"{args.method}: " + ", ".join(f"{name} {value}" for name, value in MIDDLE.items()))
    varied = [trial(f"{name} {value}", **{name: value}) for name in args.vary for value in VALUES[name]]
    return [middle, *varied, Trial(name=FULL)]


def run_settings(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    accuracy.run_comparison("benchmarks.quality.settings", arguments, args, trials_of(args))


def main() -> None:
    command_line.run_script(run_settings)


if __name__ == "__main__":
    main()
