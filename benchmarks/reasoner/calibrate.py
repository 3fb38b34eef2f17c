"""`kvllm calibrate` on the reasoner's problems with their workings, a piece for each.

    python -m benchmarks.reasoner.calibrate --layer-losses
    python -m benchmarks.reasoner.calibrate --layer-losses --model benchmarks/reasoner/earlier --task program

Windows begin behind the prompts, and problems that are too short for one tell no losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from benchmarks.common import command_line, texts
from kvllm.calibration.files import calibrate
from kvllm.calibration.layer_losses import Windows
from kvllm.calibration.query_statistics import OUTLIERS
from kvllm.comparison.texts import Text


def run_calibration(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.reasoner.calibrate", __doc__)
    texts.add_arguments(parser)
    parser.add_argument("--pieces", type=int, default=64, metavar="N", help="most pieces (default 64)")
    parser.add_argument("--layer-losses", action="store_true", help="measure what each layer loses, too")
    args = parser.parse_args(arguments)
    texts.check_arguments(args, OUTLIERS)
    command_line.require_positive(args, "pieces")
    pieces = [
        Text("", text.token_ids[: text.num_prompt], text.token_ids[text.num_prompt :])
        for text in islice(texts.read_texts(args, OUTLIERS), args.pieces)
    ]
    for path in calibrate(args.model, pieces, texts.describe(args), Windows() if args.layer_losses else None):
        print(f"Written: {path}")


if __name__ == "__main__":
    command_line.run_script(run_calibration)
