"""The arithmetic of recall: bounds in float64, and which pairs change places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvllm.compression.recall import candidates, missing_mass, num_needed, upper_scores
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.quantize import codec


@pytest.mark.parametrize("name", [None, *KV_FORMATS])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), scale=st.floats(0.01, 30), num_dropped=st.integers(1, 40))
def test_no_mass_exceeds_its_bound(name: str | None, seed: int, scale: float, num_dropped: int) -> None:
    """Bounds come from the keys as they are stored, the mass from the keys as they were."""
    torch.manual_seed(seed)
    queries, keys = torch.randn(2, 3, 4, 16).double() * scale, torch.randn(2, 3, num_dropped + 5, 16).double()
    stored = keys[:, :, :num_dropped]
    if name:
        parts = codec(KV_FORMATS[name].keys)
        stored = parts.dequantize(*parts.quantize(stored)).double()
    errors = (stored - keys[:, :, :num_dropped]).norm(dim=-1)
    scores = queries @ keys.mT
    mass = scores.softmax(-1)[..., :num_dropped].sum(-1)
    upper = upper_scores(queries @ stored.mT, queries, errors)
    bound = missing_mass(scores[..., num_dropped:].logsumexp(-1), upper)
    assert (mass <= bound + 1e-12).all()
    if name is None:
        assert torch.allclose(mass, bound)


def test_the_best_dropped_pairs_replace_the_worst_residents() -> None:
    gain = torch.tensor([[0.5, 3.0, 2.0], [0.0, -1.0, 9.0]])
    loss = torch.tensor([[torch.inf, 1.0, 0.1, 2.5], [0.5, torch.inf, torch.inf, torch.inf]])
    arriving, leaving, is_gain = candidates(gain, loss, 3)
    assert arriving.tolist() == [[1, 2, 0], [2, 0, 1]]
    assert leaving[:, 0].tolist() == [2, 0] and leaving[0].tolist() == [2, 1, 3]
    assert is_gain.tolist() == [[True, True, False], [True, False, False]]
    assert [each.shape[1] for each in candidates(gain, loss, 1)] == [1, 1, 1]


def test_exchanges_end_where_the_bound_is_met() -> None:
    """In the second row one query has enough after the first exchange, the other after none."""
    missing = torch.tensor([[0.5, 0.1], [0.5, 0.5], [0.3, 0.3]])
    arriving = torch.tensor([[[0.2, 0.2, 0.09], [0.0, 0.0, 0.0]], [[0.48, 0.01, 0.0], [0.1, 0.05, 0.0]]])
    arriving = torch.cat((arriving, torch.full((1, 2, 3), 0.26)))
    leaving = torch.full((3, 2, 3), 0.001)
    assert num_needed(missing, arriving, leaving, 0.12).tolist() == [[2], [4], [1]]
    assert num_needed(missing, arriving, leaving, 0.05).tolist() == [[4], [4], [1]]
