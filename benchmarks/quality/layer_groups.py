"""Answers where layers keep different shares of each window, against one share for all, at equal bytes.

    python -m benchmarks.quality.layer_groups
    python -m benchmarks.quality.layer_groups --model benchmarks/reasoner/earlier --weights 1 1 1 5

`--retentions` are those of figure 5: the share that every layer keeps of a window without its buffer. With `--weights`,
as many KV pairs are shared out to the layers in proportion to these numbers; without, as the losses say that
`kvllm calibrate --layer-losses` has measured. Answers are compared question by question. The figures go to
layer_groups.json, a plot to layer_groups.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import floor

from msgspec import structs

from benchmarks.common import accuracy, command_line, compressions
from benchmarks.common.trials import FULL, Trial
from kvllm import CompressionConfig
from kvllm.comparison.kv_caches import check_kv_cache
from kvllm.config import LayerGroup, require

RETENTIONS = ("0.1", "0.2")
METHOD = "kara_sharp"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = accuracy.make_parser("benchmarks.quality.layer_groups", __doc__)
    add = parser.add_argument
    add("--retentions", nargs="+", default=RETENTIONS, metavar="R", help=f"default: {' '.join(RETENTIONS)}")
    add("--method", default=METHOD, help=f"which KV pairs survive (default {METHOD})")
    add("--weights", nargs="+", type=float, metavar="W", help="one for each layer")
    add("--kv-cache-dtype", default="auto", metavar="D", help="of all but the full cache (default auto)")
    compressions.add_window_arguments(parser)
    args = parser.parse_args(arguments)
    for retention in args.retentions:
        compressions.check_retention("--retentions", retention)
    check_kv_cache("--kv-cache-dtype", args.kv_cache_dtype)
    if args.weights:
        require(min(args.weights) > 0, "--weights", args.weights, "numbers above 0")
    args.retention = " and ".join(args.retentions)
    return args


def trials(args: argparse.Namespace) -> list[Trial]:
    found = []
    for retention in args.retentions:
        uniform = compressions.kara(retention, window=args.window, buffer=args.buffer, method=args.method)
        for name, compression in (("one share", uniform), ("by layer", by_layer(uniform, args.weights))):
            name = f"{name}, {retention}"
            found.append(Trial(name=name, compression=compression, kv_cache_dtype=args.kv_cache_dtype))
    return [*found, Trial(name=FULL)]


def by_layer(uniform: CompressionConfig, weights: Sequence[float] | None) -> CompressionConfig:
    """The same number of KV pairs, shared out to the layers. Blocks are single KV pairs."""
    assert uniform.retain_tokens is not None
    if weights is None:
        return structs.replace(uniform, retain_tokens=None, retain_blocks=uniform.retain_tokens, layer_groups="auto")
    scored = uniform.retain_tokens - uniform.buffer
    kept = share_out(len(weights) * scored, weights)
    groups = tuple(LayerGroup((layer,), uniform.buffer + pairs) for layer, pairs in enumerate(kept))
    return structs.replace(uniform, retain_tokens=None, layer_groups=groups)


def share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers with that total in proportion to the weights, rounded by largest remainder."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [floor(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda layer: shares[layer] - exact[layer])
    for layer in order[: total - sum(shares)]:
        shares[layer] += 1
    return shares


def run_layer_groups(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    accuracy.run_comparison("benchmarks.quality.layer_groups", arguments, args, trials(args))


def main() -> None:
    command_line.run_script(run_layer_groups)


if __name__ == "__main__":
    main()
