"""Published models, which `make models` fetches: transformers' tokens and log probabilities, answers, compression."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvllm import LLM, CompressionConfig, RequestOutput, SamplingParams
from kvllm.tokenizer import load_tokenizer
from tests.helpers.engines import greedy

SMOLLM2, GEMMA3 = "SmolLM2-135M-Instruct", "gemma-3-270m"
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
PROMPTS = ("1, 2, 3, 4, 5, 6,", "def fibonacci(n):\n", TEXT[:2900])
"""The last one has more tokens than a window of Gemma 3."""


@pytest.fixture(scope="module")
def smollm2(real_model: Callable[[str], Path]) -> Path:
    return real_model(SMOLLM2)


def make_llm(path: Path, **options: Any) -> LLM:
    """In float32, with prompts in chunks of 256 tokens."""
    defaults = {"dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 300, "max_num_batched_tokens": 256}
    return LLM(path, **defaults | options)


def assert_those_of_transformers(path: Path, outputs: list[RequestOutput]) -> None:
    """Greedy tokens, and their log probabilities but for rounding: sums of float32 numbers in another order."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for output in outputs:
        completion = output.outputs[0]
        token_ids, count = completion.token_ids, len(completion.token_ids)
        ids = torch.tensor([output.prompt_token_ids + token_ids])
        with torch.inference_mode():
            expected = model(ids, use_cache=False, logits_to_keep=count + 1).logits[0, :-1].log_softmax(-1)
        assert expected.argmax(-1).tolist() == token_ids
        logprobs = completion.logprobs or []
        found = [of_token[token_id].logprob for of_token, token_id in zip(logprobs, token_ids, strict=True)]
        torch.testing.assert_close(torch.tensor(found), expected.amax(-1), atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", [SMOLLM2, pytest.param(GEMMA3, marks=pytest.mark.long)])
def test_tokens_and_log_probabilities_of_transformers(real_model: Callable[[str], Path], name: str) -> None:
    path = real_model(name)
    outputs = make_llm(path).generate(PROMPTS, greedy(12, logprobs=0), use_tqdm=False)
    assert len(outputs[-1].prompt_token_ids) > 512 and outputs[0].outputs[0].text.startswith(" 7, 8, 9")
    assert_those_of_transformers(path, outputs)


def test_a_chat_ends_by_itself(smollm2: Path) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=64, logprobs=0)
    [output] = make_llm(smollm2).chat(messages, params, use_tqdm=False)
    assert str(output.prompt).endswith("user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    assert "Paris" in output.outputs[0].text and output.outputs[0].finish_reason == "stop"
    assert_those_of_transformers(smollm2, [output])


def test_digits_and_spaces_are_tokens_as_in_training(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    found = [tokenizer.decode([token_id]) for token_id in tokenizer.encode("x =  2024")]
    assert found == ["x", " =", "  ", "2", "0", "2", "4"]


def test_compression_returns_blocks(smollm2: Path) -> None:
    compression = CompressionConfig(method="mean_attention", policy="pressure", retain_blocks=1, buffer=16)
    llm = make_llm(smollm2, dtype="bfloat16", num_gpu_blocks_override=40, compression=compression)
    prompts = [TEXT[start : start + 300] for start in (0, 1000, 2000, 3000)]
    outputs = llm.generate(prompts, greedy(128), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [128] * 4
    stats = llm.stats()
    assert stats.windows_compressed > 0 and stats.blocks_released == 3 * stats.windows_compressed
