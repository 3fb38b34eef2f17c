"""Engines over tiny checkpoints, and greedy tokens: of the engine and of transformers."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
import transformers

from kvllm import LLM, ConfigError, SamplingParams
from kvllm.attention.reference import ReferenceBackend

PROMPT_LENGTHS = (1, 2, 7, 16, 17, 40, 63, 100)
NEW_TOKENS = 128


def random_prompts(vocab: int, lengths=PROMPT_LENGTHS, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(3, vocab) for _ in range(length)]} for length in lengths]


def greedy(max_tokens: int = NEW_TOKENS, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def make_llm(path: Path, **options) -> LLM:
    defaults = {"block_size": 16, "num_gpu_blocks_override": 400, "max_num_batched_tokens": 512}
    return LLM(path, **(defaults | options))


def least_pool(path: Path, **options) -> int:
    """Blocks of the smallest pool that an engine takes."""
    with pytest.raises(ConfigError, match="KV blocks") as refused:
        LLM(path, num_gpu_blocks_override=1, **options)
    return int(re.findall(r"needs (\d+) KV blocks", str(refused.value))[0])


def tokens(llm: LLM, prompts: list[dict], params: SamplingParams | None = None) -> list[list[int]]:
    outputs = llm.generate(prompts, params or greedy(), use_tqdm=False)
    assert all(output.error is None for output in outputs)
    assert llm.llm_engine.scheduler.blocks.num_owned == 0
    return [output.outputs[0].token_ids for output in outputs]


def assert_greedy(path: Path, prompts: list[dict], found: list[list[int]]) -> None:
    """`found` are transformers' greedy tokens: each has the largest logit after those before it."""
    kind = getattr(transformers, transformers.AutoConfig.from_pretrained(path).architectures[0])
    model = kind.from_pretrained(path, dtype=torch.float32)
    for prompt, token_ids in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt["prompt_token_ids"] + token_ids])
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0]
        assert logits[-len(token_ids) - 1 : -1].argmax(-1).tolist() == token_ids


def random_token_ids(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 256) for _ in range(length)] for length in lengths]


def records_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend "reference" be recorded as "triton" is, sequences with several query tokens as well."""
    monkeypatch.setattr(ReferenceBackend, "capturable", True)
    monkeypatch.setattr(ReferenceBackend, "captures_chunks", True)
