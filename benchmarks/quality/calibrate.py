"""Statistics of a model's queries on a text, for the methods that need them, and what its layers lose with the KV
pairs that the text looks up, for `layer_groups="auto"`: two files beside the checkpoint.

    python -m benchmarks.quality.calibrate --model DIR --text FILE
    python -m benchmarks.quality.calibrate --model benchmarks/reasoner/earlier --task program

The model reads the text in pieces. Of every layer and query head the script takes the mean, the covariance and the
lengths of queries before rotary embedding, without the first four tokens of a piece, which are outliers. The text
should have all kinds of what the model will write, for KV pairs that only other kinds ask for are dropped. `--task`
reads problems of the reasoner with their workings instead, a piece for each. The default for the model of the package
is problems of all its tasks in turn.

The files are kv_statistics.safetensors and kv_layer_losses.json in the checkpoint's folder. The first one takes 4 bytes
for each of `d * d + 1.5 * d` numbers of a query head: 65 MiB for 32 layers of 32 heads with 128 channels.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import command_line, report, texts
from benchmarks.common.internals import observe_projections, runner_of
from benchmarks.common.layer_losses import LayerLoss
from kvllm import LLM, SamplingParams
from kvllm.compression.rotation import pair_lengths, rotate, rotation
from kvllm.compression.statistics import QueryStatistics, write_statistics
from kvllm.config import require
from kvllm.layer_shares import LAYER_LOSSES_FILE
from kvllm.models.config import load_model_config
from kvllm.models.rotary import rotary_frequencies

OUTLIERS = 4
"""First tokens of a piece that are left out: the attention sinks."""
BLOCK_SIZE = 16


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.quality.calibrate", __doc__)
    texts.add_arguments(parser)
    parser.add_argument("--pieces", type=int, default=64, metavar="N", help="most pieces (default 64)")
    args = parser.parse_args(arguments)
    texts.check_arguments(args, OUTLIERS)
    texts.check_writable(args.model)
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
def calibrate(path: Path, pieces: Sequence[list[int]]) -> tuple[QueryStatistics, list[list[float]]]:
    """Statistics of a checkpoint's queries, `[layers, Hq, ...]`, and the losses of its layers (`LayerLosses.losses`),
    over texts given as token ids."""
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

    losses = [LayerLoss(config.scale) for _ in range(config.num_layers)]

    def observe(layer: int, queries: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> None:
        losses[layer].add(queries, keys)
        cos, sin = rotation(positions, frequencies)
        sums[layer].add(rotate(queries.transpose(0, 1), cos, -sin)[:, positions >= OUTLIERS])

    observe_projections(llm, observe)
    prompts = [{"prompt_token_ids": piece} for piece in pieces]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    found = [of_layer.statistics() for of_layer in sums]
    statistics = QueryStatistics(
        torch.stack([of_layer.mean for of_layer in found]),
        torch.stack([of_layer.magnitude for of_layer in found]),
        torch.stack([of_layer.covariance for of_layer in found]),
    )
    return statistics, [of_layer.losses() for of_layer in losses]


def run_calibration(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    pieces = [text.token_ids for text in islice(texts.read_texts(args, OUTLIERS), args.pieces)]
    num_tokens = sum(map(len, pieces))
    metadata = {"text": texts.describe(args), "tokens": str(num_tokens)}
    statistics, losses = calibrate(args.model, pieces)
    written = write_statistics(args.model, statistics, metadata)
    of_layers = args.model / LAYER_LOSSES_FILE
    report.write_json(of_layers, {"losses": losses, "text": metadata["text"], "tokens": num_tokens})
    size = written.stat().st_size / 1024
    print(f"Written: {written} ({size:.0f} KiB) and {of_layers.name}, from {num_tokens:,} tokens")


def main() -> None:
    command_line.run_script(run_calibration)


if __name__ == "__main__":
    main()
