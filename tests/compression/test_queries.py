"""Which query tokens of a window are recomputed, against a literal definition."""

from __future__ import annotations

import pytest

from kvllm.compression.queries import QueryTokens
from kvllm.compression.specs import SPECS
from tests.helpers.compressions import paper_compression

SIZES = [(12, 4, 1), (12, 4, 3), (768, 32, 8), (5, 0, 5), (7, 1, 4), (10, 3, 0), (2, 3, 0), (2, 3, 1), (10, 0, 0)]


@pytest.mark.parametrize(("window", "recent", "stride"), SIZES)
def test_every_so_many_th_before_the_recent_ones(window: int, recent: int, stride: int) -> None:
    last_before = window - recent - 1
    literal = [i for i in range(window) if i > last_before or (stride and (last_before - i) % stride == 0)]
    tokens = QueryTokens(recent, stride)
    assert tokens.offsets(window) == literal
    assert tokens.count(window) == len(literal)
    assert tokens.attended(window) == sum(i + 1 for i in literal)


def test_every_method_recomputes_the_queries_it_needs() -> None:
    expected = {"window": (5, 3), "buffer": (5, 0), "recent": (7, 0), "none": (0, 0)}
    options = {"buffer": 5, "query_stride": 3, "query_window": 7}
    threshold = {"policy": "threshold", "threshold_tokens": 64, "budget_tokens": 32}
    for name, spec in SPECS.items():
        config = paper_compression(method=name, **options, **(threshold if spec.refusal("periodic") else {}))
        literal = (5, 1) if spec.repeats else expected[spec.queries]
        assert QueryTokens.of(config, learns=spec.learns) == QueryTokens(*literal), name
        if spec.learns:
            assert QueryTokens.of(config) == QueryTokens(0, 0)
