"""Statistics of a model's queries on a text, for the methods that need them, and what the model loses when one layer
compresses, for `layer_groups="auto"`: two files beside the checkpoint.

    python -m benchmarks.quality.calibrate --model DIR --text FILE
    python -m benchmarks.quality.calibrate --layer-losses --model benchmarks/reasoner/earlier --task program

The model reads the text in pieces. Of every layer and query head the script takes the mean, the covariance and the
lengths of queries before rotary embedding, without the first four tokens of a piece, which are outliers. The text
should have all kinds of what the model will write, for KV pairs that only other kinds ask for are dropped. `--task`
reads problems of the reasoner with their workings instead, a piece for each. The default for the model of the package
is problems of all its tasks in turn.

The first file, kv_statistics.safetensors, takes 4 bytes for each of `d * d + 1.5 * d` numbers of a query head: 65 MiB
for 32 layers of 32 heads with 128 channels. kv_layer_losses.json is written with `--layer-losses` alone, because each
text is read once more for each layer and share: with 32 layers 192 times. Memory is that of the
attention of a text in one layer, written out. Windows begin behind a problem's prompt, and texts without one are left
out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from tqdm import tqdm

from benchmarks.common import command_line, compressions, layer_losses, report, texts
from benchmarks.common.internals import observe_projections, runner_of
from benchmarks.common.texts import Text
from kvllm import LLM, SamplingParams
from kvllm.compression.rotation import pair_lengths, rotate, rotation
from kvllm.compression.statistics import QueryStatistics, write_statistics
from kvllm.config import require
from kvllm.layer_shares import LAYER_LOSSES_FILE, LayerLosses, convex
from kvllm.models.config import load_model_config
from kvllm.models.rotary import rotary_frequencies

OUTLIERS = 4
"""First tokens of a piece that are left out: the attention sinks."""
BLOCK_SIZE = 16


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.quality.calibrate", __doc__)
    texts.add_arguments(parser)
    add = parser.add_argument
    add("--pieces", type=int, default=64, metavar="N", help="most pieces (default 64)")
    add("--layer-losses", action="store_true", help="measure what each layer loses, too")
    compressions.add_window_arguments(parser)
    args = parser.parse_args(arguments)
    texts.check_arguments(args, OUTLIERS)
    texts.check_writable(args.model)
    allowed = f"at least 1 and less than --window {args.window}"
    require(1 <= args.buffer < args.window, "--buffer", args.buffer, allowed)
    require(args.pieces >= 1, "--pieces", args.pieces, "at least 1")
    return args


class Sums:
    """Sums over the queries of one layer, in float64."""

    def __init__(self, num_heads: int, head_dim: int, device: torch.device) -> None:
        exact: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.count = 0
        self.mean = torch.zeros(num_heads, head_dim, **exact)
        self.magnitude = torch.zeros(num_heads, head_dim // 2, **exact)
        self.product = torch.zeros(num_heads, head_dim, head_dim, **exact)

    def add(self, queries: torch.Tensor) -> None:
        """queries: `[Hq, tokens, d]`, before the rotation."""
        self.count += queries.shape[1]
        self.mean += queries.double().sum(dim=1)
        self.magnitude += pair_lengths(queries).double().sum(dim=1)
        self.product += torch.bmm(queries.double().mT, queries.double())

    def statistics(self) -> QueryStatistics:
        mean = self.mean / self.count
        covariance = self.product / self.count - mean[:, :, None] * mean[:, None]
        return QueryStatistics(mean, self.magnitude / self.count, covariance)


@torch.inference_mode()
def calibrate(path: Path, pieces: Sequence[list[int]]) -> QueryStatistics:
    """Statistics of a checkpoint's queries over texts given as token ids, `[layers, Hq, ...]`."""
    config = load_model_config(path)
    longest = max(map(len, pieces))
    llm = LLM(
        path,
        max_model_len=longest + 1,
        max_num_seqs=1,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=-(-(longest + 1) // BLOCK_SIZE) + 1,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    device = runner_of(llm).model.final_norm.device
    sums = [Sums(config.num_query_heads, config.head_dim, device) for _ in range(config.num_layers)]
    frequencies = rotary_frequencies(config, longest + 1).to(device)

    def observe(layer: int, queries: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> None:
        cos, sin = rotation(positions, frequencies)
        sums[layer].add(rotate(queries.transpose(0, 1), cos, -sin)[:, positions >= OUTLIERS])

    observe_projections(llm, observe)
    prompts = [{"prompt_token_ids": piece} for piece in pieces]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    found = [of_layer.statistics() for of_layer in sums]
    return QueryStatistics(
        torch.stack([of_layer.mean for of_layer in found]),
        torch.stack([of_layer.magnitude for of_layer in found]),
        torch.stack([of_layer.covariance for of_layer in found]),
    )


def with_windows(args: argparse.Namespace, pieces: Sequence[Text]) -> list[Text]:
    """The texts that have a window. Raises ConfigError if there is none."""
    found = [text for text in pieces if layer_losses.starts(text, args.window, args.buffer)]
    allowed = f"less than the tokens of a text behind its prompt, of which none has more than {args.window}"
    require(bool(found), "--window", args.window, allowed)
    return found


def write_layer_losses(args: argparse.Namespace, pieces: Sequence[Text]) -> None:
    shown = tqdm(pieces, desc="Layer losses", disable=not sys.stderr.isatty())
    found = layer_losses.measure(args.model, shown, args.window, args.buffer)
    losses = [convex(layer_losses.SHARES, of_layer) for of_layer in found]
    num_tokens = sum(len(text.token_ids) for text in pieces)
    measured = LayerLosses(list(layer_losses.SHARES), losses, texts.describe(args), num_tokens)
    report.write_json(args.model / LAYER_LOSSES_FILE, structs.asdict(measured))
    print(f"Written: {args.model / LAYER_LOSSES_FILE}, from {num_tokens:,} tokens")


def run_calibration(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    found = list(islice(texts.read_texts(args, OUTLIERS), args.pieces))
    of_losses = with_windows(args, found) if args.layer_losses else []
    num_tokens = sum(len(text.token_ids) for text in found)
    statistics = calibrate(args.model, [text.token_ids for text in found])
    written = write_statistics(args.model, statistics, {"text": texts.describe(args), "tokens": str(num_tokens)})
    print(f"Written: {written} ({written.stat().st_size / 1024:.0f} KiB), from {num_tokens:,} tokens", flush=True)
    if of_losses:
        write_layer_losses(args, of_losses)


def main() -> None:
    command_line.run_script(run_calibration)


if __name__ == "__main__":
    main()
