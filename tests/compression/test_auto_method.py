"""The method that `method="auto"` stands for: what the checkpoint is prepared for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.questions import QuestionSource
from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.compression.specs import STATISTICS_FILE
from kvllm.engine_args import DEFAULT_MODEL, EngineArgs
from kvllm.errors import ConfigError

WINDOWS: dict[str, Any] = {"period": 8, "window_blocks": 4, "buffer": 8}
SIZES: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 80}


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The model of the package without its statistics."""
    for file in Path(DEFAULT_MODEL).iterdir():
        if file.name != STATISTICS_FILE:
            (tmp_path / file.name).symlink_to(file)
    return tmp_path


def method_of(model: str | Path, **options: Any) -> str:
    args = EngineArgs(model=model, block_size=16, compression=CompressionConfig(**WINDOWS, **options))
    compression = args.engine_config.compression
    assert compression is not None
    return compression.method


def test_statistics_of_the_checkpoint_decide(bare: Path) -> None:
    assert method_of(DEFAULT_MODEL) == method_of(DEFAULT_MODEL, policy="pressure") == "expected_attention_calibrated"
    assert method_of(bare) == "kara_sharp"
    assert method_of(DEFAULT_MODEL, score_source="recomputed") == "kara_sharp"  # which the other method has not
    for model in (DEFAULT_MODEL, bare):
        assert method_of(model, method="keydiff") == "keydiff"


def test_a_threshold_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="method='auto' is not allowed: only with windows: .* such as \"keydiff\""):
        CompressionConfig(policy="threshold", threshold_tokens=64, budget_tokens=32)


@pytest.mark.parametrize("calibrated", [True, False])
def test_an_engine_says_what_it_chose_and_does_it(
    bare: Path, calibrated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = DEFAULT_MODEL if calibrated else bare
    chosen = "expected_attention_calibrated" if calibrated else "kara_sharp"
    prompt = QuestionSource(sizes=(8, 8), count=1).load().prompts[0]
    texts = []
    for options in ({}, {"method": chosen}):
        with caplog.at_level(logging.INFO, "kvllm"):
            llm = LLM(model, compression=CompressionConfig(**WINDOWS, **options), **SIZES)
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=150), use_tqdm=False)[0]
        assert output.metrics.evicted_entries > 0
        texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]
    auto, named = [record.getMessage() for record in caplog.records if record.name == "kvllm.engine_builder"]
    has = "has" if calibrated else "has no"
    assert auto.endswith(f"compression by {chosen} (method=auto: the checkpoint {has} {STATISTICS_FILE}), periodic")
    assert named.endswith(f"compression by {chosen}, periodic")
