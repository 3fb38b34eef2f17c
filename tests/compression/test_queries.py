"""Which query tokens of a window are recomputed."""

from __future__ import annotations

import pytest

from kvllm import CompressionConfig
from kvllm.compression.queries import query_tokens
from kvllm.compression.specs import SPECS
from tests.helpers.compressions import fitting


@pytest.mark.parametrize("size", [3, 12, 768])
def test_every_method_recomputes_the_queries_it_needs(size: int) -> None:
    expected = {"window": size, "buffer": min(5, size), "recent": min(7, size), "none": 0}
    options = {"buffer": 5, "query_window": 7, "threshold_tokens": 64, "budget_tokens": 32}
    for name, spec in SPECS.items():
        policy = "threshold" if spec.ragged else "periodic"
        config = CompressionConfig(**fitting(name, policy, **options))
        literal = size if spec.repeats else expected[spec.queries]
        assert query_tokens(config, size) == literal, name
