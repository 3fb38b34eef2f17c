"""Texts that engines are given token by token, and the names of their KV caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvllm import LLM, SamplingParams
from kvllm.comparison.kv_caches import check_kv_cache, kv_cache_options
from kvllm.comparison.teacher_forcing import TeacherForcing
from kvllm.errors import ConfigError
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import random_token_ids


def test_given_tokens_are_as_good_as_a_longer_prompt(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", head_dim=16)
    token_ids = random_token_ids(30, 17)
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 2
    expected = LLM(tmp_path).generate(token_ids, params, use_tqdm=False)
    prompts, forced = [ids[:5] for ids in token_ids], [ids[5:] for ids in token_ids]
    longer = [SamplingParams(temperature=0, max_tokens=12 + len(ids), ignore_eos=True) for ids in forced]
    outputs = TeacherForcing(LLM(tmp_path)).feed(prompts, forced, longer)
    for output, ids, other in zip(outputs, forced, expected, strict=True):
        assert output.outputs[0].token_ids == ids + other.outputs[0].token_ids


def test_names_of_caches() -> None:
    assert kv_cache_options("int4+32") == ("int4", 32) and kv_cache_options("auto") == ("auto", 0)
    for name in ("int5", "int4+", "int4+x", "+3"):
        with pytest.raises(ConfigError, match="--kv-cache-dtype"):
            check_kv_cache("--kv-cache-dtype", name)
