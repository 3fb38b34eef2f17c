"""Mixtures of experts: quantized, in a batch, and as gpt-oss stores them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvllm.attention.registry import make_backend
from kvllm.errors import CheckpointError
from kvllm.models.config import load_model_config
from kvllm.models.loader import load_model, random_model
from kvllm.parallel import SingleRank
from tests.helpers.checkpoints import edit, make_checkpoint
from tests.helpers.families import FAMILIES
from tests.helpers.paged_model import CPU, PagedModel, load, tokens
from tests.helpers.quantized import awq, float8, gptq, quantize_checkpoint
from tests.helpers.thread_shard import ThreadShard
from tests.models.test_quantized_checkpoints import AWQ, FP8, GPTQ, on_two_ranks

QWEN3_MOE = {**FAMILIES["qwen3-moe-some-layers"], "moe_intermediate_size": 64, "intermediate_size": 128}
MODELS = {
    "experts": QWEN3_MOE,
    "fused projections": {**FAMILIES["phi3-partial"], "head_dim": 16, "intermediate_size": 128},
}
UNQUANTIZED = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.input_layernorm"]
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "fp8": ({**FP8, "modules_to_not_convert": UNQUANTIZED}, float8((48, 32), "weight_scale_inv")),
    "awq": (AWQ, awq(32)),
    "gptq": (GPTQ, gptq(4, 32, True, False)),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_quantized_checkpoints(tmp_path: Path, model: str, case: str) -> None:
    """The logits of the values that the weights stand for, on one rank and on two."""
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", *CASES[case], MODELS[model])
    expected, found = (PagedModel(*load(tmp_path / name)).logits({0: tokens(20)}) for name in ("plain", "quantized"))
    assert (found - expected).norm() < 1e-3 * expected.norm()
    for logits in on_two_ranks(tmp_path / "quantized", tokens(20)):
        assert (logits - found).norm() < 1e-3 * found.norm()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "glm4-moe"])
def test_experts_of_few_bits(tmp_path: Path, family: str, bits: int) -> None:
    """Near the model of full weights; the router stays as it is."""
    make_checkpoint(tmp_path, **FAMILIES[family])
    full, config = load(tmp_path)
    few = load_model(tmp_path, config, SingleRank(), torch.float32, CPU, config.max_position_embeddings, bits)
    experts: Any = few.layers[1].mlp
    assert experts.down.weight.scales is not None and experts.router.scales is None
    steps = [{0: tokens(20), 1: tokens(7, 2)}, {0: [5], 1: [9]}]
    models = [PagedModel(model, config) for model in (full, few)]
    expected, found = (torch.cat([paged.logits(step) for step in steps]) for paged in models)
    similarity = torch.nn.functional.cosine_similarity(expected, found).median()
    assert (0.99 if bits == 8 else 0.8) < similarity < 0.99999


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "gemma3", "glm4", "glm4-moe"])
def test_batch_mates_do_not_change_a_token(tmp_path: Path, family: str) -> None:
    """Bit for bit, though other tokens go to the same experts."""
    make_checkpoint(tmp_path, **FAMILIES[family])
    model, config = load(tmp_path, torch.bfloat16)

    def last(mates: bool) -> torch.Tensor:
        paged = PagedModel(model, config, torch.bfloat16, lambda *args: make_backend("auto", *args))
        paged.logits({0: tokens(20), **({1: tokens(13, 2)} if mates else {})})
        return paged.logits({0: [5], **({1: [9], 2: tokens(30, 3)} if mates else {})})[0]

    alone = last(False)
    assert alone.isfinite().all() and torch.equal(alone, last(True))


def test_random_experts_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    for family in ("qwen3-moe", "gpt-oss"):
        make_checkpoint(tmp_path / family, **FAMILIES[family])
        config = load_model_config(tmp_path / family)
        args = (torch.float32, CPU, 64, 7)
        ranks = [ThreadShard(rank, threading.Barrier(2), []) for rank in range(2)]
        mlps: list[Any] = [random_model(config, shard, *args).layers[1].mlp for shard in (SingleRank(), *ranks)]
        whole, *parts = mlps
        rows = torch.arange(whole.down.weight.out_features)
        halves = [part.down.weight.rows(rows) for part in parts]
        assert torch.equal(torch.cat(halves, 1), whole.down.weight.rows(rows)) and halves[0].std() > 0.015


def mxfp4_checkpoint(plain: Path, quantized: Path) -> None:
    """Random gpt-oss with experts in MXFP4, and with the numbers that transformers makes of them."""
    make_checkpoint(plain, **FAMILIES["gpt-oss"])
    generator = torch.Generator().manual_seed(0)
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(119, 126, (experts, rows, columns // 32), generator=generator).to(torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    quantized.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors")
    (quantized / "config.json").write_text((plain / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    edit(quantized, quantization_config=json.loads(json.dumps(settings)))


def test_mxfp4_is_expanded(tmp_path: Path) -> None:
    """Bit for bit as transformers does, on one rank; and the same model on two."""
    mxfp4_checkpoint(tmp_path / "plain", tmp_path / "quantized")
    expected, found = (PagedModel(*load(tmp_path / name)).logits({0: tokens(20)}) for name in ("plain", "quantized"))
    assert torch.equal(found, expected)
    for logits in on_two_ranks(tmp_path / "quantized", tokens(20)):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_what_is_not_computed_is_refused(tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path / "plain", tmp_path / "quantized")
    path = tmp_path / "quantized"
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({key: value for key, value in tensors.items() if key != name}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        load(path)
    for settings, message in (
        ({"quantization_config": FP8}, "quantized by 'fp8': kvllm computes mxfp4"),
        ({"num_local_experts": 0}, "num_experts is 0, but must be at least 1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but must be at least 1 and at most 8"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0.0, but must be positive"),
    ):
        text = (tmp_path / "plain" / "config.json").read_text()
        edit(tmp_path / "plain", **settings)
        with pytest.raises(CheckpointError, match=message):
            load_model_config(tmp_path / "plain")
        (tmp_path / "plain" / "config.json").write_text(text)
