"""The method and the shares by layer that `method="auto"` stands for: what the checkpoint is prepared for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.common.questions import QuestionSource
from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.compression.specs import STATISTICS_FILE
from kvllm.config import LayerGroup
from kvllm.engine_args import DEFAULT_MODEL, EngineArgs
from kvllm.errors import ConfigError
from kvllm.layer_shares import LAYER_LOSSES_FILE

WINDOWS: dict[str, Any] = {"period": 8, "window_blocks": 4, "retain_blocks": 2, "buffer": 8}
SIZES: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 80}


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The model of the package without its statistics and losses."""
    for file in Path(DEFAULT_MODEL).iterdir():
        if file.name not in (STATISTICS_FILE, LAYER_LOSSES_FILE):
            (tmp_path / file.name).symlink_to(file)
    return tmp_path


def method_of(model: str | Path, **options: Any) -> str:
    args = EngineArgs(model=model, block_size=16, compression=CompressionConfig(**WINDOWS, **options))
    compression = args.engine_config.compression
    assert compression is not None
    return compression.method


def test_statistics_of_the_checkpoint_decide(bare: Path) -> None:
    assert method_of(DEFAULT_MODEL) == method_of(DEFAULT_MODEL, policy="pressure") == "expected_attention_calibrated"
    assert method_of(bare) == method_of(bare, policy="pressure") == "mean_attention"
    for options in ({"compress_prompt": True}, {"query_stride": 2}, {"guard_kl": 0.1}, {"score_source": "recomputed"}):
        assert method_of(bare, **options) == "kara_sharp"  # windows alone, or other scores
    assert method_of(DEFAULT_MODEL, score_source="recomputed") == "kara_sharp"  # which the other method has not
    for model in (DEFAULT_MODEL, bare):
        assert method_of(model, method="keydiff") == "keydiff"


def kept_by_layers(model: str | Path = DEFAULT_MODEL, engine: dict[str, Any] | None = None, **options: Any) -> set[int]:
    """Numbers of blocks of a window that groups of layers keep; none if all keep as many."""
    compression = CompressionConfig(**WINDOWS | options)
    config = EngineArgs(model=model, block_size=16, compression=compression, **(engine or {})).engine_config
    return {group.retain_blocks for group in config.kv_groups if group.retain_blocks is not None}


def test_losses_of_the_checkpoint_decide_the_shares(bare: Path) -> None:
    assert kept_by_layers() == kept_by_layers(layer_groups="auto") == kept_by_layers(score_source="recomputed")
    assert len(kept_by_layers()) > 1
    assert kept_by_layers(bare) == kept_by_layers(method="kara_sharp") == set()
    (bare / LAYER_LOSSES_FILE).symlink_to(Path(DEFAULT_MODEL) / LAYER_LOSSES_FILE)
    assert kept_by_layers(bare) == kept_by_layers() and method_of(bare) == "mean_attention"


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"retain_tokens": 30}, {}),
        ({"guard_kl": 0.01}, {}),
        ({"recall_bound": 0.3, "buffer": 16}, {"kv_offloading_size": 0.1}),
        ({}, {"disable_hybrid_kv_cache_manager": True}),
        ({}, {"kv_cache_dtype": "int4", "kv_residual_tokens": 8}),
    ],
)
def test_what_does_not_go_with_shares_by_layer_has_one_share(options: dict[str, Any], engine: dict[str, Any]) -> None:
    assert kept_by_layers(engine=engine, **options) == set()


def test_layers_that_are_named_stay() -> None:
    groups = [{"layers": [0, 1, 2], "retain_blocks": 1}, {"layers": [3], "retain_blocks": 3}]
    assert kept_by_layers(layer_groups=msgspec.convert(groups, tuple[LayerGroup, ...])) == {1, 3}


def test_a_threshold_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="method='auto' is not allowed: only with windows: .* such as \"keydiff\""):
        CompressionConfig(policy="threshold", threshold_tokens=64, budget_tokens=32)


@pytest.mark.parametrize("calibrated", [True, False])
def test_an_engine_says_what_it_chose_and_does_it(
    bare: Path, calibrated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = DEFAULT_MODEL if calibrated else bare
    chosen = "expected_attention_calibrated" if calibrated else "mean_attention"
    prompt = QuestionSource(sizes=(8, 8), count=1).load().prompts[0]
    texts = []
    for options in ({}, {"method": chosen} | ({"layer_groups": "auto"} if calibrated else {})):
        with caplog.at_level(logging.INFO, "kvllm"):
            llm = LLM(model, compression=CompressionConfig(**WINDOWS, **options), **SIZES)
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=150), use_tqdm=False)[0]
        assert output.metrics.evicted_entries > 0
        texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]
    auto, named = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    has = "has" if calibrated else "has no"
    kept = kept_by_layers(model)
    shares = f", layers keep {min(kept)} to {max(kept)} of 4 blocks" if calibrated else ""
    found = f"(method=auto: the checkpoint {has} {STATISTICS_FILE})"
    assert auto.endswith(f"compression by {chosen} {found}, periodic{shares}")
    assert named.endswith(f"compression by {chosen}, periodic{shares}")
