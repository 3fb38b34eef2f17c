"""Which drafted tokens are right: what comes has the model's distribution, whatever was drafted."""

from __future__ import annotations

import pytest
import torch

from kvllm import SamplingParams
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.sampler import SampleRows
from kvllm.worker.verification import verify

DRAWS = 100_000
CRITICAL = 25.7
"""Of chi-square with 5 degrees of freedom, at 1e-4."""


@pytest.mark.parametrize("draft", [[0, 3], [4, 2]], ids=["likely", "unlikely"])
def test_tokens_have_the_distribution_of_the_model(draft: list[int]) -> None:
    """The first, those after a right one, and those after two."""
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -1.0], [0.0, 0.3, 0.0, 1.2, 0.1, -0.5], [1.0, 0, 1, 0, 2, 0]])
    params = SamplingParams(temperature=0.8)
    rows = [SampleRow(params, seed, [1], []) for seed in range(DRAWS)]
    found = [
        [token.token_id for token in tokens]
        for tokens in verify(logits.repeat(DRAWS, 1), SampleRows(rows), [draft] * DRAWS)
    ]
    for depth, expected in enumerate((logits / 0.8).softmax(-1)):
        drawn = [tokens[depth] for tokens in found if tokens[:depth] == draft[:depth]]
        counts = torch.bincount(torch.tensor(drawn), minlength=6)
        assert len(drawn) > 400
        assert float(((counts - len(drawn) * expected) ** 2 / (len(drawn) * expected)).sum()) < CRITICAL
    assert all(tokens[:-1] == draft[: len(tokens) - 1] for tokens in found)
