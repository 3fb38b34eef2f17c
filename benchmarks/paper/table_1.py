"""What the parts of Kara contribute (paper, table 1).

    python -m benchmarks.paper.table_1

Kara, Kara whose windows are scored by the queries of the buffer alone instead of all of them (no bidirectional
attention), and Kara that keeps the best single entries instead of completing chunks (no Token2Chunk), all with the same
number of entries, on the same questions. The figures go to table_1.json and a plot to table_1.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.common import accuracy, compressions
from benchmarks.common.trials import FULL, Trial
from kvllm.errors import KvLLMError

PARTS = {"kara": "Kara", "kara_no_bi": "no bidirectional attention", "kara_no_token2chunk": "no Token2Chunk"}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = accuracy.make_parser("benchmarks.paper.table_1", __doc__)
    parser.add_argument("--retention", default="0.4", help="default: 0.4")
    parser.add_argument("--window", type=int, default=compressions.WINDOW, help=f"default: {compressions.WINDOW}")
    parser.add_argument("--buffer", type=int, default=compressions.BUFFER, help=f"default: {compressions.BUFFER}")
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


def main() -> None:
    try:
        args = parse_arguments(sys.argv[1:])
        accuracy.run_comparison("benchmarks.paper.table_1", sys.argv[1:], args, trials_of(args))
    except KvLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
