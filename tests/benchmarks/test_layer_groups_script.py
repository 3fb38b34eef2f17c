"""Trials that compare one share for all layers with shares by layer."""

from __future__ import annotations

import pytest

from benchmarks.common.trials import FULL
from benchmarks.quality import layer_groups
from kvllm.errors import ConfigError


def test_layers_share_out_as_many_pairs_as_one_share_keeps() -> None:
    arguments = ["--weights", "1", "1", "1", "5", "--retentions", "0.1", "0.3", "--kv-cache-dtype", "int6_int4"]
    *trials, full = layer_groups.trials(layer_groups.parse_arguments(arguments))
    assert (full.name, full.kv_cache_dtype, full.compression) == (FULL, "auto", None)
    for uniform, by_layer in zip(trials[::2], trials[1::2], strict=True):
        assert uniform.kv_cache_dtype == by_layer.kv_cache_dtype == "int6_int4"
        assert uniform.compression and by_layer.compression and uniform.compression.retain_tokens
        kept = by_layer.compression.retained_by_layer([None] * 4)
        buffer = uniform.compression.buffer
        assert sum(kept) == 4 * uniform.compression.retain_tokens
        assert max(kept[:3]) - min(kept[:3]) <= 1 and abs(kept[3] - buffer - 5 * (kept[0] - buffer)) <= 5


def test_whole_numbers_in_proportion() -> None:
    assert layer_groups.share_out(8, [1, 1, 1, 5]) == [1, 1, 1, 5]
    assert layer_groups.share_out(10, [1, 1, 1]) == [4, 3, 3]
    assert layer_groups.share_out(7, [2.5, 0.5]) == [6, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-dtype", "int3"], "--kv-cache-dtype='int3' is not allowed: one of auto"),
        (["--weights", "1", "0", "1", "5"], "--weights=[1.0, 0.0, 1.0, 5.0] is not allowed: numbers above 0"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layer_groups.parse_arguments(arguments)
    assert message in str(caught.value)
