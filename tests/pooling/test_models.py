"""Embeddings, scores and classes of small models beside transformers' own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, CheckpointError, ConfigError, PoolingParams, RequestError
from kvllm.models.config import load_model_config
from tests.helpers.checkpoints import edit, make_checkpoint
from tests.helpers.families import FAMILIES
from tests.helpers.pooling import GEMMA, add_modules, embedding, hidden_states, logits, save

LENGTHS = (3, 40, 1, 17, 16, 33, 64)
PROMPTS = [[random.Random(length).randrange(3, 256) for _ in range(length)] for length in LENGTHS]
QWEN = {"family": "qwen3", "head_dim": 16}


def start(path: Path, **options: Any) -> LLM:
    return LLM(str(path), dtype="float32", max_num_batched_tokens=64, max_num_seqs=4, **options)


def assert_embeds(llm: LLM, expected: Any) -> None:
    outputs = llm.embed(PROMPTS, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected(prompt), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["", "ForCausalLM"])
def test_qwen3_embedding(tmp_path: Path, kind: str) -> None:
    """Of a folder of sentence-transformers, with the names of the base class and without a head, or whole."""
    model = save(tmp_path, kind, **QWEN)
    add_modules(tmp_path, "lasttoken")
    llm = start(tmp_path)
    assert_embeds(llm, lambda prompt: embedding(model, prompt, "LAST"))


def test_embedding_gemma(tmp_path: Path) -> None:
    """Tokens attend to both sides, in windows, too; the mean goes through two layers."""
    model = save(tmp_path, "", **GEMMA)
    layers = add_modules(tmp_path, "mean_tokens", dense=[(64, 96), (96, 48)])
    assert_embeds(start(tmp_path), lambda prompt: embedding(model, prompt, "MEAN", layers))


def test_a_window_as_long_as_the_longest_text(tmp_path: Path) -> None:
    """Halved for each side, it has an effect."""
    options = {"sliding_window": 64, "max_position_embeddings": 64, "use_bidirectional_attention": True}
    make_checkpoint(tmp_path, "gemma3_text", architectures=["Gemma3TextModel"], **options)
    assert set(load_model_config(tmp_path, generates=False).windows) == {33}


def test_config_of_embeddinggemma(tmp_path: Path) -> None:
    """The published one: a window of 512 tokens is 256 to either side, and the token itself."""
    keys = {
        "architectures": ["Gemma3TextModel"],
        "model_type": "gemma3_text",
        "_sliding_window_pattern": 6,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "dtype": "float32",
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 768,
        "intermediate_size": 1152,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
        "max_position_embeddings": 2048,
        "num_attention_heads": 3,
        "num_hidden_layers": 24,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "use_bidirectional_attention": True,
        "vocab_size": 262144,
    }
    (tmp_path / "config.json").write_text(json.dumps(keys))
    config = load_model_config(tmp_path, generates=False)
    assert not config.causal and not config.generates and config.architecture == "Gemma3ForCausalLM"
    assert config.windows == ((257,) * 5 + (None,)) * 4
    with pytest.raises(CheckpointError, match="use_bidirectional_attention"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_attention_to_both_sides_that_is_not_computed(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, **FAMILIES[family])
    with pytest.raises(CheckpointError, match="those after them"):
        start(tmp_path, runner="pooling", hf_overrides={"is_causal": False})


def test_weights_of_few_bits(tmp_path: Path) -> None:
    """Near those of float32."""
    make_checkpoint(tmp_path, **QWEN)
    exact, rounded = (
        torch.tensor([each.outputs.embedding for each in start(tmp_path, runner="pooling", **more).embed(PROMPTS)])
        for more in ({}, {"quantization": "int8"})
    )
    assert 1e-6 < (exact - rounded).abs().max() < 0.05


def test_is_causal_false(tmp_path: Path) -> None:
    model = save(tmp_path, "", "llama", is_causal=False)
    edit(tmp_path, is_causal=False)
    llm = start(tmp_path, pooler_config={"pooling_type": "CLS"})
    assert_embeds(llm, lambda prompt: embedding(model, prompt, "CLS"))
    first, other = (output.outputs.embedding for output in llm.embed([[5, 6, 7], [5, 8, 9]], use_tqdm=False))
    assert first != other  # the first token has seen those after it


@pytest.mark.parametrize("family", ["llama-tied", "mistral-window", "gemma2", "gpt-oss", "qwen3-moe", "phi3"])
@pytest.mark.parametrize("pooling", ["LAST", "MEAN"])
def test_every_family_embeds(tmp_path: Path, family: str, pooling: str) -> None:
    model = make_checkpoint(tmp_path, **FAMILIES[family])
    llm = start(tmp_path, runner="pooling", pooler_config={"pooling_type": pooling}, block_size=4)
    assert_embeds(llm, lambda prompt: embedding(model, prompt, pooling))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classifier(tmp_path: Path, family: str, num_labels: int) -> None:
    model = save(tmp_path, "ForSequenceClassification", family, head_dim=16, num_labels=num_labels)
    outputs = start(tmp_path).classify(PROMPTS, use_tqdm=False)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        scores = logits(model, prompt)
        expected = scores.sigmoid() if num_labels == 1 else scores.softmax(0)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, rtol=0, atol=1e-5)


def test_problem_types(tmp_path: Path) -> None:
    model = save(tmp_path, "ForSequenceClassification", "llama", num_labels=3)
    scores = logits(model, PROMPTS[1])
    kinds = {
        "regression": scores,
        "multi_label_classification": scores.sigmoid(),
        "single_label_classification": scores.softmax(0),
    }
    for kind, expected in kinds.items():
        llm = start(tmp_path, hf_overrides={"problem_type": kind})
        (output,) = llm.classify(PROMPTS[1], use_tqdm=False)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, rtol=0, atol=1e-5)
        (output,) = llm.encode(PROMPTS[1], PoolingParams(use_activation=False), use_tqdm=False)
        torch.testing.assert_close(output.outputs.data, scores, rtol=0, atol=1e-4)


def test_each_token(tmp_path: Path) -> None:
    """`LLM.encode` gives a vector of every token, beside prompts that get one."""
    model = save(tmp_path, "", **QWEN)
    add_modules(tmp_path, "lasttoken")
    llm = start(tmp_path)
    params = [PoolingParams(task="token_embed", normalize=False), PoolingParams(), PoolingParams(normalize=False)]
    every, one, raw = llm.encode(PROMPTS[1:4], params, use_tqdm=False)
    states = [hidden_states(model, prompt) for prompt in PROMPTS[1:4]]
    torch.testing.assert_close(every.outputs.data, states[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(one.outputs.data, embedding(model, PROMPTS[2], "LAST"), rtol=0, atol=1e-5)
    torch.testing.assert_close(raw.outputs.data, states[2][-1], rtol=0, atol=1e-4)


def test_dimensions(tmp_path: Path) -> None:
    """An embedding is cut, then normalized, if the model was trained for that."""
    model = save(tmp_path, "", **QWEN)
    add_modules(tmp_path, "lasttoken")
    whole = embedding(model, PROMPTS[1], "LAST")
    cut = PoolingParams(dimensions=24)
    with pytest.raises(RequestError, match="is_matryoshka"):
        start(tmp_path).embed(PROMPTS[1], pooling_params=cut)
    llm = start(tmp_path, hf_overrides={"is_matryoshka": True})
    (output,) = llm.embed(PROMPTS[1], pooling_params=cut, use_tqdm=False)
    expected = torch.nn.functional.normalize(whole[:24], dim=0)
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=1e-5)
    with pytest.raises(RequestError, match="1 to 64"):
        llm.embed(PROMPTS[1], pooling_params=PoolingParams(dimensions=65))
    llm = start(tmp_path, hf_overrides={"matryoshka_dimensions": [16, 32]})
    with pytest.raises(RequestError, match="16, 32"):
        llm.embed(PROMPTS[1], pooling_params=cut)


def test_sentence_transformers_without_normalize(tmp_path: Path) -> None:
    model = save(tmp_path, "", **QWEN)
    add_modules(tmp_path, "mean_tokens", normalize=False)
    (output,) = start(tmp_path).embed(PROMPTS[1], use_tqdm=False)
    expected = hidden_states(model, PROMPTS[1]).mean(0)
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=1e-4)


def test_refusals(tmp_path: Path) -> None:
    """Nothing is computed if one prompt cannot be."""
    make_checkpoint(tmp_path, **QWEN)
    generator = LLM(str(tmp_path), kv_cache_memory_bytes=1 << 20)
    with pytest.raises(RequestError, match='runner="pooling"'):
        generator.embed(PROMPTS)
    llm = start(tmp_path, runner="pooling", max_model_len=40)
    for prompts, message in (
        ([[1, 2], [3] * 41], r"prompts\[1\]: the prompt has 41 tokens"),
        ([[1], []], r"prompts\[1\]: the prompt is empty"),
        ([[256]], "token id 256"),
        (["text"], "no tokenizer"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.embed(prompts)
    assert llm.embed([], use_tqdm=False) == []
    (output,) = llm.embed(PROMPTS[6], pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert output.prompt_token_ids == PROMPTS[6][:40]
    with pytest.raises(RequestError, match=r"use LLM\.embed"):
        llm.classify(PROMPTS)
    with pytest.raises(RequestError, match="token_embed"):
        llm.encode(PROMPTS, pooling_task="classify")
    with pytest.raises(RequestError, match="generates text"):
        llm.generate(PROMPTS)
    with pytest.raises(ConfigError, match="normalise"):
        PoolingParams(normalise=True)


def test_options_of_generation_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **QWEN)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2"):
        start(tmp_path, runner="pooling", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="pooling_type"):
        start(tmp_path, runner="pooling", pooler_config={"pooling_type": "ALL"})
    with pytest.raises(ConfigError, match="runner"):
        start(tmp_path, runner="draft")


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    save(tmp_path, "ForSequenceClassification", "llama", num_labels=3)
    with pytest.raises(CheckpointError, match="scores of classes"):
        start(tmp_path, runner="generate")
    with pytest.raises(CheckpointError, match="shape"):
        start(tmp_path, hf_overrides={"num_labels": 4})
    with pytest.raises(CheckpointError, match="problem_type"):
        start(tmp_path, hf_overrides={"problem_type": "unknown"})
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(CheckpointError, match="modules.json"):
        start(tmp_path)


def test_pooling_that_is_not_computed(tmp_path: Path) -> None:
    save(tmp_path, "", **QWEN)
    add_modules(tmp_path, "weightedmean_tokens")
    with pytest.raises(CheckpointError, match="weightedmean"):
        start(tmp_path)
