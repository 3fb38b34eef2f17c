"""Kernels that only some steps need, launched before the first one: compiling them stops everything for seconds."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from kvllm.models.layers import quantized_matrices
from kvllm.models.quantized_matrix import NUMBERS_OF_ROWS
from kvllm.sampling_params import SamplingParams
from kvllm.worker.draws import reads_in_place
from kvllm.worker.model_runner import ModelRunner
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.sampler import SampleRows, sample

FILTERS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 2}, {"top_k": 2, "top_p": 0.9})
"""Each has kernels of its own; that of min-p is in all of them."""
CHANGES: tuple[dict[str, Any], ...] = ({}, {"allowed_token_ids": [0]})
"""Logits are of the model's dtype, or of float32 once they are changed, as by a mask."""


@torch.inference_mode()
def launch_rare_kernels(runner: ModelRunner) -> None:
    """Launch each variant of the kernels that sample, the one that copies blocks, which writes block 0 over itself,
    those that experts and adapters have for few rows, which only graphs would launch otherwise, and those of integers.

    All ranks do it together.
    """
    first = torch.zeros(1, dtype=torch.int64, device=runner.device)
    runner.operations.copy_blocks(first, first)
    hidden = runner.model.embedding.forward(first)
    for layer in runner.model.layers:
        layer.mlp.forward(hidden)
    for matrix in quantized_matrices(runner.model.weights()):
        for num_rows in NUMBERS_OF_ROWS:
            matrix.multiply(hidden.new_zeros(num_rows, matrix.in_features), None)
    if runner.adapters:
        runner.adapters.launch_few()
    part, parts = runner.model.logits(hidden, rounded=reads_in_place(hidden)), runner.forward_pass.parts
    parts.most_likely(part)
    logits = parts.gather(part, [0])
    if runner.samples:
        for filters, changes in product(FILTERS, CHANGES):
            sample(logits, SampleRows([SampleRow(SamplingParams(**filters, **changes), 0, [], [])]))
