"""The Kara paper: the variants that it compares, the settings of tables 2 and 3, and the figures that are known."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.common import command_line, engines, runs
from benchmarks.common.variants import Variant
from kvllm.config import CompressionConfig, require

PAPER = "Kara: Efficient Reasoning LLM Serving via Sliding-Window KV Cache Compression, arXiv 2607.01237"
PUBLISHED = {"Kara, 257 of 768": "+12.75%"}
"""The gain in output throughput over the full cache. The other figures of the tables are not at hand."""
WINDOWS: dict[str, Any] = {"policy": "periodic", "window_blocks": 3, "buffer": 32}
"""Of the paper's runs, beside the defaults; at blocks of 256 tokens."""
PRESETS: dict[str, runs.Preset] = {
    "paper": {
        "model": "8b",
        "num_prompts": 500,
        "input_len": 128,
        "output_median": 2048,
        "output_sigma": 0.8,
        "max_output_len": 8192,
        "block_size": 256,
        "max_num_seqs": [16, 32, 64, 128, 256],
        "pool_fraction": 0.5,
        "repeats": 3,
    },
    "cpu": {
        "model": "50m",
        "num_prompts": 24,
        "input_len": 64,
        "output_median": 256,
        "output_sigma": 0.6,
        "max_output_len": 768,
        "block_size": 64,
        "max_num_seqs": [8, 16],
        "pool_fraction": 0.5,
        "repeats": 1,
    },
}


def paper_variants(block_size: int) -> dict[str, Variant]:
    """The variants of the paper, and the modes of KvLLM, by their names on the command line.

    The paper's numbers are for blocks of 256 tokens: SnapKV cuts 1280 KV pairs to 1025, KvLLM keeps 257 of 768 every
    128 steps, with a buffer of 32. Other block sizes scale them.
    """
    require(block_size >= 8, "--block-size", block_size, "at least 8: the paper's numbers are scaled by it")
    threshold, budget = 5 * block_size, 4 * block_size + 1
    eighth = block_size // 8
    snapkv = CompressionConfig(
        method="snapkv",
        policy="threshold",
        threshold_tokens=threshold,
        budget_tokens=budget,
        query_window=eighth,
        buffer=eighth,
    )

    def kara(**options: Any) -> CompressionConfig:
        eighths: dict[str, Any] = {"period": block_size // 2, "buffer": eighth, "chunk_budget": eighth}
        return CompressionConfig(method="kara", **WINDOWS | eighths | options)

    return {
        "vanilla": Variant("vanilla"),
        "snapkv": Variant(f"SnapKV, {threshold} to {budget}", snapkv),
        "periodic": Variant(
            f"KvLLM periodic, {block_size + 1} of {3 * block_size}", kara(retain_tokens=block_size + 1)
        ),
        "periodic-blocks": Variant("KvLLM periodic, 1 block of 3", kara()),
        "pressure": Variant("KvLLM pressure, 1 block of 3", kara(policy="pressure")),
    }


def published_gain(variant: str) -> str:
    """The paper's gain in output throughput over the full cache, or "not known"."""
    return {"vanilla": "", "periodic": PUBLISHED["Kara, 257 of 768"]}.get(variant, "not known")


def add_variant_arguments(parser: argparse.ArgumentParser) -> None:
    names = tuple(paper_variants(256))
    parser.add_argument("--variants", nargs="+", choices=names, default=names, metavar="V", help=", ".join(names))


def chosen_variants(args: argparse.Namespace) -> dict[str, Variant]:
    command_line.require_unique("--variants", args.variants)
    variants = paper_variants(args.block_size)
    return {name: variants[name] for name in args.variants}


def parse_arguments(module: str, description: str | None, arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments of tables 2 and 3, over the defaults of their preset."""
    parser = runs.make_parser(module, description, PRESETS)
    add_variant_arguments(parser)
    parser.add_argument("--repeats", type=int, help="runs of each variant")
    add = engines.add_engine_arguments(parser)
    add("--max-num-seqs", type=int, nargs="+", help="most running sequences; each number gets a table")
    args = runs.parse(parser, PRESETS, arguments)
    command_line.require_positive(args, "repeats")
    return args
