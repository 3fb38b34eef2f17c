"""The contribution of each part of Kara (table 1 of the Kara paper).

    python -m benchmarks.paper.table_1

Three versions keep the same number of KV pairs and answer the same questions: Kara; Kara with scores by the queries of
the buffer alone, instead of all queries (no bidirectional attention); and Kara with the best single KV pairs, instead
of completed chunks (no Token2Chunk). The figures go to table_1.json, a plot to table_1.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.common import accuracy, command_line, compressions
from benchmarks.common.trials import FULL, Trial

PARTS = {"kara": "Kara", "kara_no_bi": "no bidirectional attention", "kara_no_token2chunk": "no Token2Chunk"}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = accuracy.make_parser("benchmarks.paper.table_1", __doc__)
    parser.add_argument("--retention", default="0.4", help="share of a window that is kept (default 0.4)")
    compressions.add_window_arguments(parser)
    args = parser.parse_args(arguments)
    compressions.check_retention("--retention", args.retention)
    return args


def trials_of(args: argparse.Namespace) -> list[Trial]:
    options = {"window": args.window, "buffer": args.buffer}
    parts = [
        Trial(name=name, compression=compressions.kara(args.retention, method=method, **options))
        for method, name in PARTS.items()
    ]
    return [*parts, Trial(name=FULL)]


def run_table(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    accuracy.run_comparison("benchmarks.paper.table_1", arguments, args, trials_of(args))


if __name__ == "__main__":
    command_line.run_script(run_table)
