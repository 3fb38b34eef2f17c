"""The method that `method="auto"` stands for, and the defaults beside it."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from benchmarks.reasoner.tasks import make_problem
from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.compression.specs import SPECS
from kvllm.engine_args import EngineArgs
from kvllm.errors import ConfigError
from tests.helpers.compressions import paper_compression

WINDOWS: dict[str, Any] = {"period": 8, "window_blocks": 4, "retain_blocks": 2, "buffer": 8}
SIZES: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 80}


def method_of(**options: Any) -> str:
    args = EngineArgs(block_size=16, compression=paper_compression(**WINDOWS, **options))
    compression = args.engine_config.compression
    assert compression is not None and not compression.layer_groups
    return compression.method


def test_options_decide() -> None:
    assert method_of() == method_of(policy="pressure") == "mean_attention"
    assert method_of(compress_prompt=True) == "snapkv"  # windows alone
    assert method_of(method="keydiff") == "keydiff"


def test_a_threshold_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="method='auto' is not allowed: only with windows: .* such as \"keydiff\""):
        CompressionConfig(policy="threshold", threshold_tokens=64, budget_tokens=32)


def test_the_defaults_go_with_every_method_and_block_size() -> None:
    for method, spec in SPECS.items():
        for block_size in (16, 64, 256):
            if not spec.refusal("windows"):
                assert CompressionConfig(method=method).retained(block_size) == 2 * block_size


def test_an_engine_says_what_it_chose_and_does_it(caplog: pytest.LogCaptureFixture) -> None:
    prompt = make_problem(random.Random(0), 8).prompt
    texts = []
    for options in ({}, {"method": "mean_attention"}):
        with caplog.at_level(logging.INFO, "kvllm"):
            llm = LLM(compression=paper_compression(**WINDOWS, **options), **SIZES)
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=150), use_tqdm=False)[0]
        assert output.metrics.evicted_entries > 0
        texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]
    auto, named = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    cost = "in a quarter of the bytes SmolLM2-135M loses 0.087 nats, by lot 0.149"
    assert auto.endswith(f"compression by mean_attention (method=auto: {cost}), periodic")
    assert named.endswith("compression by mean_attention, periodic")
