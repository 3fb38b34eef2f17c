"""The kernels that choose tokens, against the functions for CPUs with the same random numbers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from benchmarks.device.check_kernels import name_of, poisoned
from benchmarks.device.log import Figures, Log, within
from benchmarks.device.target import Target
from kvllm import SamplingParams
from kvllm.worker import draws
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.sampler import SampleRows, sample

OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-p": {"temperature": 0.6, "top_p": 0.95},
    "top-k": {"top_k": 50},
    "top-k, top-p and min-p": {"top_k": 200, "top_p": 0.9, "min_p": 0.02},
}
ALLOWED = 0.02
"""The share of draws that may differ: probabilities may, in their last bits."""


def run(target: Target, log: Log) -> None:
    rows, vocab = target.size((128, 128256), (6, 300))
    with poisoned():
        for dtype in target.size((torch.bfloat16, torch.float32), (torch.float32,)):
            logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)).mul_(3).to(dtype)
            title = f"{rows} x {vocab}, {name_of(dtype)}"
            log.check(f"most likely tokens: {title}", partial(most_likely, target, logits))
            for name, options in OPTIONS.items():
                log.check(f"{name}: {title}", partial(drawn, target, logits, [options]))
            every = [*OPTIONS.values(), {"temperature": 0}]
            log.check(f"all of these in a batch: {title}", partial(drawn, target, logits, every))
        log.check("sampling with seeds", partial(sampling, target))


def most_likely(target: Target, logits: torch.Tensor) -> None:
    """The first one of ties; none of a row that makes no sense."""
    logits = logits.round()
    for row, value in enumerate((math.nan, math.inf)):
        logits[row, 7] = value
    logits[2] = -math.inf
    found = draws.most_likely(logits.to(target.device)).tolist()
    assert found == draws.most_likely(logits.float()).tolist()
    assert found[:3] == [draws.NO_TOKEN] * 3 and min(found[3:]) >= 0


def drawn(target: Target, logits: torch.Tensor, options: list[dict[str, Any]]) -> Figures:
    """Of every second row, the last one first."""
    rows = list(range(len(logits)))[::-2]
    params = [SamplingParams(**options[row % len(options)]) for row in rows]
    uniforms = torch.rand(len(rows), generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    pairs = zip(*(choose(each, rows, params, uniforms) for each in (logits.to(target.device), logits)), strict=True)
    return within(sum(found != expected for found, expected in pairs) / len(rows), ALLOWED)


def choose(logits: torch.Tensor, rows: list[int], params: list[SamplingParams], uniforms: list[float]) -> list[int]:
    if draws.reads_in_place(logits):
        return draws.choose(logits, rows, params, uniforms).tolist()
    return draws.choose(logits[rows].float(), list(range(len(rows))), params, uniforms).tolist()


def sampling(target: Target) -> Figures:
    """The tokens that the CPU samples; probabilities may differ in their last bits, so a rare draw may too."""
    rows, vocab = target.size((64, 32000), (8, 300))
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3
    differing = 0
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=50, min_p=0.01),
    ):

        def tokens(logits: torch.Tensor, params: SamplingParams = params) -> list[int]:
            samples = sample(logits, SampleRows([SampleRow(params, seed, [1], []) for seed in range(rows)]))
            return [token.token_id for token in samples.tokens()]

        pairs = zip(tokens(logits.to(target.device)), tokens(logits), strict=True)
        differences = sum(found != expected for found, expected in pairs)
        assert not (params.greedy and differences)
        differing += differences
    return within(differing / (2 * rows), 0.05)
