"""Models that compute with the integers of a GGUF file, against the same with these expanded to float32."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from kvllm import LLM
from kvllm.files.gguf.integers import FORMS, decode
from kvllm.files.groups import GroupForm
from kvllm.models.base import Decoder
from kvllm.models.experts import ExpertsMLP
from kvllm.models.latent_attention import LatentAttention
from kvllm.models.parts import GatedMLP
from kvllm.models.qwen3_5 import GatedDeltaNet
from kvllm.parallel import SingleRank
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import greedy
from tests.helpers.families import FAMILIES
from tests.helpers.gguf_files import write_gguf
from tests.helpers.gguf_quantizers import quantize
from tests.helpers.paged_model import PagedModel, load, tokens

WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "initializer_range": 0.08}


def make(path: Path, type: Type | Callable[[str], Type], name: str = "llama-tied", **options: Any) -> None:
    folder = path.parent / "transformers"
    model = make_checkpoint(folder, **FAMILIES[name] | WHOLE_BLOCKS | options)
    shutil.rmtree(folder)
    write_gguf(path, model, type)


def logits(model: tuple[Decoder, Any]) -> torch.Tensor:
    token_ids, paged = tokens(40), PagedModel(*model)
    return torch.cat([paged.logits({0: token_ids[:39]}), paged.logits({0: token_ids[39:]})])


def assert_close_to_expanded(path: Path, tolerance: float = 0.05) -> Decoder:
    """But for the rounding of activations to 8 bits."""
    model, config = load(path)
    found, expected = logits((model, config)), logits(load(path, expand=True))
    error = (found - expected).pow(2).mean().sqrt() / expected.std()
    assert 0 < error < tolerance, f"{error:.4f} of the standard deviation of logits"
    return model


@pytest.mark.parametrize("name", FORMS)
def test_integers_of_a_block_are_the_numbers_of_the_package(name: str) -> None:
    """With random bytes, so that every bit of a block matters."""
    type, form = Type[name], FORMS[name]
    raw = np.random.default_rng(0).integers(0, 256, (6, 3 * gguf.GGML_QUANT_SIZES[type][1]), np.uint8)
    with np.errstate(all="ignore"):
        values, scales, minimums = decode(raw, type)
        expected = gguf.dequantize(raw, type)
        found = values.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None]
        found = found if minimums is None else found - minimums[..., None]
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)
    assert values.shape[1] == scales.shape[1] * form.group and (minimums is not None) == form.minimums
    assert values.min() >= (-128 if form.bits == 8 else -form.offset)
    assert values.max() <= (127 if form.bits == 8 else (1 << form.bits) - 1 - form.offset)


@pytest.mark.parametrize("type", [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS])
def test_quantizers_of_these_tests_are_near(type: Type) -> None:
    matrix = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    error = gguf.dequantize(quantize(matrix, type), type) - matrix
    assert error.std() < {Type.Q2_K: 0.4, Type.Q3_K: 0.2, Type.Q5_K: 0.05, Type.Q6_K: 0.03}.get(type, 0.1)


USUAL = ("Q8_0", "Q4_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""Of each form one."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in FORMS]
)
def test_every_type(tmp_path: Path, name: str) -> None:
    make(tmp_path / "model.gguf", Type[name])
    model = assert_close_to_expanded(tmp_path / "model.gguf")
    assert model.weights_note == f"weights in {name.lower()} as in the file"
    assert model.embedding.weight.form == model.layers[1].attention.o.weight.form == FORMS[name]


def test_types_that_share_a_matrix(tmp_path: Path) -> None:
    """As in files of Q4_K_M: values, and half of the layers' down projections, have more bits."""

    def kind(name: str) -> Type:
        return Type.Q6_K if "v_proj" in name or "layers.1.mlp.down" in name or "lm_head" in name else Type.Q4_K

    make(tmp_path / "model.gguf", kind, "mistral")
    model = assert_close_to_expanded(tmp_path / "model.gguf")
    assert model.weights_note == "weights in q4_k/q6_k as in the file"
    assert model.layers[0].attention.qkv.weight.form == GroupForm(6, 16, minimums=True)
    mlps = [layer.mlp for layer in model.layers]
    assert [mlp.down.weight.form for mlp in mlps if isinstance(mlp, GatedMLP)] == [FORMS["Q4_K"], FORMS["Q6_K"]]
    assert model.lm_head.weight.form == FORMS["Q6_K"] and model.embedding.weight.form == FORMS["Q4_K"]


def test_a_matrix_of_which_a_part_has_no_integers_is_expanded(tmp_path: Path) -> None:
    make(tmp_path / "model.gguf", lambda name: Type.F16 if "up_proj" in name else Type.Q8_0)
    model = assert_close_to_expanded(tmp_path / "model.gguf")
    assert model.weights_note == "weights in q8_0 as in the file; weights in q8_0 become float32"
    mlp = model.layers[0].mlp
    assert isinstance(mlp, GatedMLP) and mlp.gate_up.weight.form is None and mlp.down.weight.form is not None


@pytest.mark.parametrize(
    ("family", "type"),
    [pytest.param("qwen3-moe", Type.Q4_0, marks=pytest.mark.long), ("qwen3-moe", Type.Q4_K), ("gpt-oss", Type.MXFP4)],
)
def test_experts(tmp_path: Path, family: str, type: Type) -> None:
    make(tmp_path / "model.gguf", type, family, **({"moe_intermediate_size": 256} if family == "qwen3-moe" else {}))
    model = assert_close_to_expanded(tmp_path / "model.gguf", 0.2)  # the rounding can choose other experts
    for layer in model.layers:
        assert isinstance(layer.mlp, ExpertsMLP)
        assert layer.mlp.gate_up.weight.form == layer.mlp.down.weight.form == FORMS[type.name]
        assert layer.mlp.router.form is None


@pytest.mark.parametrize("size", [32, 16])
def test_value_heads_of_linear_attention(tmp_path: Path, size: int) -> None:
    """Their columns have another order in the file, where groups must be whole."""
    layers = ["linear_attention", "full_attention"]
    make(tmp_path / "model.gguf", Type.Q8_0, "qwen3.5", layer_types=layers, linear_value_head_dim=size)
    model = assert_close_to_expanded(tmp_path / "model.gguf", 0.1)
    mixer = model.layers[0].attention
    assert isinstance(mixer, GatedDeltaNet) and mixer.inputs.form == FORMS["Q8_0"]
    assert mixer.out.weight.form == (FORMS["Q8_0"] if size == 32 else None)


@pytest.mark.parametrize("q_rank", [256, None])
def test_latent_attention(tmp_path: Path, q_rank: int | None) -> None:
    """What is multiplied head by head is expanded, and the rest is not."""
    sizes = {"q_lora_rank": q_rank, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    make(tmp_path / "model.gguf", Type.Q8_0, "deepseek-v3", **sizes, moe_intermediate_size=64)
    model = assert_close_to_expanded(tmp_path / "model.gguf", 0.2)
    attention = model.layers[1].attention
    assert isinstance(attention, LatentAttention) and attention.heads.dtype == torch.float32
    held = (attention.inputs, attention.o.weight, *([attention.queries] if attention.queries else ()))
    assert all(matrix.form == FORMS["Q8_0"] for matrix in held) and len(held) == (3 if q_rank else 2)


class SecondRank(SingleRank):
    """The second of two ranks, none of which runs."""

    rank, world_size = 1, 2


@pytest.mark.parametrize(("inner", "held"), [(512, True), (96, False)])
def test_a_rank_holds_its_part(tmp_path: Path, inner: int, held: bool) -> None:
    """Of rows and of columns, where its columns are whole groups."""
    make(tmp_path / "model.gguf", Type.Q4_1, intermediate_size=inner)
    (found, _), (expected, _) = (
        load(tmp_path / "model.gguf", shard=SecondRank(), expand=each) for each in (False, True)
    )
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert isinstance(ours.mlp, GatedMLP) and isinstance(theirs.mlp, GatedMLP)
        assert (ours.mlp.down.weight.form is not None) == held
        for a, b in ((ours.mlp.down, theirs.mlp.down), (ours.attention.qkv, theirs.attention.qkv)):
            every = torch.arange(a.weight.out_features)
            torch.testing.assert_close(a.weight.rows(every), b.weight.rows(every))


def test_the_log_says_what_became_of_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path / "model.gguf", Type.Q4_K)
    notes = {None: "in q4_k as in the file", "dtype": "in q4_k become bfloat16", "int8": "in q4_k become int8"}
    for quantization, note in notes.items():
        caplog.clear()
        with caplog.at_level(logging.INFO, "kvllm"):
            llm = LLM(tmp_path, quantization=quantization, num_gpu_blocks_override=8, max_model_len=64)
        assert [record.message for record in caplog.records if f"weights {note}" in record.message]
        [output] = llm.generate([{"prompt_token_ids": tokens(5)}], greedy(3), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
