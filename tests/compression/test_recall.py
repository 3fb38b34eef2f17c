"""The arithmetic of recall: bounds against float64, and which pairs change places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvllm.compression.recall import exchange, upper_scores
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.quantize import codec
from tests.helpers.exchange_checks import assert_exchanges


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
    scores, of_stored = queries @ keys.mT, queries @ stored.mT
    mass = scores.softmax(-1)[..., :num_dropped].sum(-1).amax(-1)
    upper = upper_scores(of_stored, queries, errors)
    given = [each.float().contiguous() for each in (scores[..., num_dropped:], of_stored, upper)]
    bound = exchange(*given, torch.zeros(2, 5, dtype=torch.bool), 1).bounds
    assert (mass <= bound + 1e-5 * scale.__ceil__()).all()
    if name is None:
        assert torch.allclose(mass.float(), bound, atol=1e-5 * scale.__ceil__())


@settings(max_examples=150, deadline=None)
@given(
    case=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**32),
            "sizes": st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
            "pairs": st.tuples(st.integers(1, 90), st.integers(1, 90)),
            "most": st.integers(1, 40),
            "limit": st.sampled_from([None, 0.0, 0.05, 0.3, 0.9]),
            "has_sinks": st.booleans(),
        }
    )
)
def test_exchanges_are_those_of_float64(case: dict[str, Any]) -> None:
    assert_exchanges(**case)


def test_exchanges_end_where_the_bound_is_met() -> None:
    """One exchange brings a query from 0.5 below 0.3, and another one would be worth it, too."""
    resident = torch.tensor([0.5, 0.0, 0.0]).log().expand(1, 1, 1, -1).contiguous()
    dropped = torch.tensor([0.3, 0.2]).log().expand(1, 1, 1, -1).contiguous()
    movable = torch.tensor([[False, True, True]])
    assert len(exchange(resident.clone(), dropped.clone(), dropped.clone(), movable, 9).row) == 2
    found = exchange(resident, dropped, dropped, movable, 9, 0.3)
    assert found.arriving.tolist() == [0] and found.leaving.tolist() == [1]
    assert found.bounds.item() == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dropped": torch.zeros(1, 2, 2, 4)}, "dimension 1 of dropped"),
        ({"upper": torch.zeros(1, 1, 2, 5)}, "dimension 3 of upper"),
        ({"movable": torch.zeros(1, 4, dtype=torch.bool)}, "dimension 1 of movable"),
        ({"resident": torch.zeros(1, 1, 2, 3, dtype=torch.float64)}, "resident has dtype"),
        ({"sinks": torch.zeros(3)}, "3 sinks for 2 queries"),
        ({"most": 0}, "at least one exchange"),
    ],
)
def test_wrong_shapes_are_refused(change: dict, words: str) -> None:
    scores = {"resident": torch.zeros(1, 1, 2, 3), "dropped": torch.zeros(1, 1, 2, 4), "upper": torch.zeros(1, 1, 2, 4)}
    given = scores | {"movable": torch.zeros(1, 3, dtype=torch.bool), "most": 2} | change
    with pytest.raises(RuntimeError, match=words):
        exchange(**given)
