"""Models from GGUF files against transformers, with the weights that the files mean."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from kvllm import LLM
from kvllm.entrypoints.cli import main
from kvllm.errors import CheckpointError
from kvllm.files.checkpoint import open_checkpoint
from kvllm.models.config import load_model_config
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import greedy
from tests.helpers.families import FAMILIES
from tests.helpers.gguf_files import write_gguf
from tests.helpers.paged_model import PagedModel, load, tokens

NAMES = (
    *("llama-tied", "llama3-rope", "llama-linear-rope-sharded", "llama-yarn", "llama-mha-head-dim", "llama-biases"),
    *("mistral", "mixtral", "qwen2", "qwen2-tied-sharded", "qwen3", "qwen3-tied-sharded", "qwen3-moe"),
    *("phi3", "phi3-window", "phi3-partial", "phi4-mini", "phi3-short", "gemma2", "gemma3", "gpt-oss"),
    *("smollm3", "granite", "granite-biases-tied", "glm4", "glm4-moe", "olmo2", "olmo3", "lfm2"),
    *("lfm2-moe", "qwen3.5", "qwen3.5-moe", "qwen3-next", "gemma4", "gemma4-packed", "gemma4-experts"),
    *("falcon-h1", "falcon-h1-norm", "deepseek-v3", "deepseek-v3-one-group-sharded", "glm4-moe-lite", "cohere2"),
)
QUANTIZED = (
    *(("llama-tied", Type.Q4_1), ("qwen3-moe", Type.Q8_0), ("gemma3", Type.Q5_0), ("gpt-oss", Type.MXFP4)),
    *(("qwen3.5", Type.Q8_0), ("gemma4-experts", Type.Q8_0), ("deepseek-v3", Type.Q8_0), ("glm4-moe-lite", Type.Q4_K)),
)
LATENT = {"hidden_size": 256, "kv_lora_rank": 256, "q_lora_rank": 256, "qk_nope_head_dim": 32, "initializer_range": 0.1}
"""Sizes with whole blocks."""


def make(path: Path, name: str, type: Any = Type.F32, **options: Any) -> torch.nn.Module:
    """Write `path`, and nothing else, of a family of FAMILIES."""
    folder = path.parent / "transformers"
    model = make_checkpoint(folder, **FAMILIES[name] | _fitting(name, type))
    shutil.rmtree(folder)
    write_gguf(path, model, type, **options)
    return model


def _fitting(name: str, type: Any) -> dict[str, Any]:
    """What a GGUF file can say: Gemma's scores are scaled by the size of its heads, LFM2's MLPs have one, and the sum
    of its experts is not scaled. Value heads have whole groups, and all layers of Qwen3-Next experts."""
    if name == "lfm2":
        return {"block_auto_adjust_ff_dim": False}
    if name == "lfm2-moe":
        return {"routed_scaling_factor": 1.0}
    if name.startswith(("qwen3.5", "qwen3-next")):
        return {"linear_value_head_dim": 32, "mlp_only_layers": []}
    if name in ("deepseek-v3", "glm4-moe-lite") and type != Type.F32:
        return LATENT
    return {"query_pre_attn_scalar": 16} if name in ("gemma2", "gemma3") else {}


def assert_logits_of_transformers(path: Path, theirs: torch.nn.Module) -> None:
    token_ids = tokens(40)
    paged = PagedModel(*load(path, expand=True))
    found = torch.cat([paged.logits({0: token_ids[:23]}), paged.logits({0: token_ids[23:]})])
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "type"), [*((name, Type.F32) for name in NAMES), *QUANTIZED])
def test_logits_equal_transformers(tmp_path: Path, name: str, type: Type) -> None:
    path = tmp_path / "model.gguf"
    assert_logits_of_transformers(path, make(path, name, type))


def assert_greedy(path: Path, theirs: torch.nn.Module, **options: Any) -> None:
    llm = LLM(path, dtype="float32", num_gpu_blocks_override=40, block_size=16, max_model_len=64, **options)
    prompts = [tokens(length, seed=length) for length in (5, 12, 30)]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy(12), use_tqdm=False)
    for output in outputs:
        found = list(output.outputs[0].token_ids)
        assert len(found) == 12
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*(output.prompt_token_ids or []), *found]])).logits[0]
        assert logits[-13:-1].argmax(-1).tolist() == found


def test_greedy_tokens_of_a_file_and_of_a_directory_that_has_it(tmp_path: Path) -> None:
    theirs = make(tmp_path / "tiny.Q8_0.gguf", "qwen3", Type.Q8_0)
    (tmp_path / "mmproj-tiny.gguf").write_bytes(b"the image encoder of another model")
    for path in (tmp_path / "tiny.Q8_0.gguf", tmp_path):
        assert_greedy(path, theirs, quantization="dtype")


@pytest.mark.parametrize("name", ["lfm2-moe", "qwen3.5", "gemma4", "deepseek-v3", "glm4-moe-lite"])
def test_greedy_tokens_of_other_layers(tmp_path: Path, name: str) -> None:
    assert_greedy(tmp_path / "model.gguf", make(tmp_path / "model.gguf", name))


@pytest.mark.parametrize(("name", "type"), [("deepseek-v3", Type.Q8_0), ("deepseek-v3-one-group-sharded", Type.F32)])
def test_older_files_of_latent_attention(tmp_path: Path, name: str, type: Type) -> None:
    """Keys and values of all heads are one matrix, and sizes have other names."""
    path = tmp_path / "model.gguf"
    assert_logits_of_transformers(path, make(path, name, type, split_heads=False))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3-one-group-sharded", "glm4-moe-lite"])
def test_the_config_of_latent_attention(tmp_path: Path, name: str, split: bool) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    yarn |= {"rope_theta": 500.0, "original_max_position_embeddings": 256, "beta_fast": 16.0, "beta_slow": 2.0}
    changed: dict[str, Any] = {"rms_norm_eps": 2**-20, "routed_scaling_factor": 1.75, "num_nextn_predict_layers": 0}
    changed |= {"rope_parameters": yarn} if name == "deepseek-v3" else {}
    model = make_checkpoint(tmp_path / "transformers", **FAMILIES[name] | changed)
    expected = load_model_config(tmp_path / "transformers")
    write_gguf(tmp_path / "model.gguf", model, split_heads=split)
    found = load_model_config(tmp_path / "model.gguf")
    assert found == msgspec.structs.replace(expected, architecture="DeepseekV3ForCausalLM")
    assert (found.softmax_scale != (12 + 8) ** -0.5) == (name == "deepseek-v3")


def test_keys_and_values_of_heads_are_as_in_the_checkpoint(tmp_path: Path) -> None:
    theirs = make(tmp_path / "model.gguf", "deepseek-v3").state_dict()
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    with open_checkpoint(tmp_path).open_tensors() as found:
        assert found[name].shape == theirs[name].shape
        for rows in (slice(None), slice(5, 40), slice(64, 256), torch.tensor([200, 3, 31, 3, 32])):
            assert torch.equal(found[name].read(rows), theirs[name][rows])


def without_function(writer: gguf.GGUFWriter) -> None:
    del writer.kv_data[0]["deepseek2.expert_gating_func"]


def test_the_function_of_experts_of_latent_attention(tmp_path: Path) -> None:
    """First files of GLM-4.7-Flash name none, nor do those of DeepSeek-V2, whose experts have no biases."""
    path = tmp_path / "model.gguf"
    make(path, "glm4-moe-lite", change=without_function)
    assert load_model_config(path).experts is not None
    path.write_bytes(path.read_bytes().replace(b"exp_probs_b", b"exp_probs_x"))
    with pytest.raises(CheckpointError, match=r"deepseek2.expert_gating_func is 1: kvllm computes 2, of 1, softmax,"):
        load_model_config(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_gating_func", 1, "expert_gating_func is 1: kvllm computes 2, of 1, softmax, and 2, sigmoid"),
        ("attention.indexer.top_k", 2048, "attention.indexer.top_k is 2048, which kvllm does not support"),
        ("attention.temperature_scale", 0.1, "attention.temperature_scale is 0.1"),
        ("attention.kv_lora_rank", 1 << 40, "head_dim is 1099511627784, but must be at least 1"),
        ("attention.q_lora_rank", -5, "sizes of latent attention are "),
        ("attention.key_length_mla", 3, "sizes of latent attention are .24, 8, -5, "),
        ("attention.value_length_mla", (1 << 63) - 1, "sizes of latent attention are "),
        ("attention.value_length_mla", 1.5, "v_head_dim"),
        ("rope.dimension_count", 7, "head_dim is 31, but rotary embedding needs a positive even number"),
        ("rope.scaling.yarn_log_multiplier", float("nan"), "yarn_log_multiplier is nan, but must be a number"),
        ("expert_count", 0, "num_experts|expert"),
        ("expert_count", (1 << 63) - 1, "expert"),
        ("expert_group_count", 3, "n_group is 3 and topk_group 2"),
        ("expert_group_used_count", 1 << 40, "n_group is 4 and topk_group 1099511627776"),
        ("expert_shared_count", -1, "n_shared_experts is -1"),
        ("nextn_predict_layers", 3, "block_count says 0 layers"),
    ],
)
def test_numbers_of_latent_attention_that_are_not_computed(
    tmp_path: Path, key: str, value: float, message: str
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        kind = gguf.GGUFValueType.FLOAT64 if isinstance(value, float) else gguf.GGUFValueType.INT64
        writer.add_key_value(f"deepseek2.{key}", value, kind)

    path = tmp_path / "model.gguf"
    make(path, "deepseek-v3", change=change)
    with pytest.raises(CheckpointError, match=rf"^{path}: .*({message})"):
        load_model_config(path)


def test_a_layer_that_predicts_later_tokens_is_left_out(tmp_path: Path) -> None:
    theirs: Any = make(tmp_path / "model.gguf", "qwen3.5", change=lambda writer: writer.add_nextn_predict_layers(1))
    theirs.model.layers = theirs.model.layers[:3]
    theirs.config.num_hidden_layers = 3
    assert_logits_of_transformers(tmp_path / "model.gguf", theirs)


def test_parts_of_a_file(tmp_path: Path) -> None:
    theirs = make(tmp_path / "tiny.gguf", "llama-tied", Type.Q4_0, split_max_tensors=10)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for path in (tmp_path, parts[0], parts[2]):
        assert_logits_of_transformers(path, theirs)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"one of 3 parts, and others are absent, tiny-00002-of-00003.gguf"):
        load(parts[0])


def test_a_link_keeps_its_name(tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub."""
    blob, link = tmp_path / "blobs" / "0a1b", tmp_path / "snapshots" / "model.gguf"
    blob.parent.mkdir()
    link.parent.mkdir()
    theirs = make(tmp_path / "model.gguf", "qwen2")
    (tmp_path / "model.gguf").rename(blob)
    link.symlink_to(blob)
    assert_greedy(link, theirs)


def test_weights_of_four_bits_are_made_of_those_of_a_file(tmp_path: Path) -> None:
    theirs = make(tmp_path / "model.gguf", "llama-tied", Type.F16)
    config = load_model_config(tmp_path / "model.gguf")
    assert config.dtype == "float16" and config.tie_word_embeddings
    expected = theirs.get_parameter("model.layers.0.mlp.up_proj.weight")
    with open_checkpoint(tmp_path).open_tensors() as found:
        assert torch.equal(found["model.layers.0.mlp.up_proj.weight"].read(), expected)
    assert_generates(LLM(tmp_path, quantization="int4", num_gpu_blocks_override=8, max_model_len=64))


def assert_generates(llm: LLM) -> None:
    [output] = llm.generate([{"prompt_token_ids": tokens(5)}], greedy(3), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def test_rows_of_queries_and_keys_are_as_in_the_checkpoint(tmp_path: Path) -> None:
    """llama.cpp's converter has permuted those of this family; another reading of it gives other rows."""
    theirs = make(tmp_path / "model.gguf", "llama-biases").state_dict()
    checkpoint = open_checkpoint(tmp_path)
    with checkpoint.open_tensors() as found:
        for name in ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.weight"):
            name = f"model.layers.1.self_attn.{name}"
            assert torch.equal(found[name].read(), theirs[name])
            some = torch.tensor([3, 1, 15])
            assert torch.equal(found[name].read(some), theirs[name][some])
            assert torch.equal(found[name].read(slice(2, 9)), theirs[name][2:9])
    raw = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    [queries] = [torch.tensor(tensor.data) for tensor in raw if tensor.name == "blk.1.attn_q.weight"]
    assert not torch.equal(queries, theirs["model.layers.1.self_attn.q_proj.weight"])


def test_norms_of_gemma_are_without_the_one_that_the_file_has(tmp_path: Path) -> None:
    theirs = make(tmp_path / "model.gguf", "gemma3").state_dict()
    with open_checkpoint(tmp_path).open_tensors() as found:
        for name in ("model.norm.weight", "model.layers.2.self_attn.q_norm.weight"):
            torch.testing.assert_close(found[name].read(), theirs[name], atol=2e-7, rtol=0)
            assert theirs[name].abs().mean() < 0.5


def test_layers_of_gemma_3_with_windows(tmp_path: Path) -> None:
    make(tmp_path / "a.gguf", "gemma3", change=lambda writer: writer.add_sliding_window_pattern(3))
    assert load_model_config(tmp_path / "a.gguf").windows == (7, 7, None, 7, 7, None, 7)
    layers = [True, False, True, True, True, False, False]
    make(tmp_path / "b.gguf", "gemma3", change=lambda writer: writer.add_sliding_window_pattern(layers))
    assert load_model_config(tmp_path / "b.gguf").windows == (7, None, 7, 7, 7, None, None)


def test_plan_reads_the_header_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "model.gguf", "gemma3", Type.Q8_0)
    data = (tmp_path / "model.gguf").read_bytes()
    header = data[: -len(data) // 2]
    with (tmp_path / "model.gguf").open("wb") as file:  # the weights are a hole
        file.write(header)
        file.truncate(len(data))
    main(["plan", str(tmp_path / "model.gguf"), "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["bytes_per_token"] == 7 * 2 * 2 * 16 * 2  # layers, keys and values, heads, numbers, bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_float32("llama.attention.scale", 0.5), "llama.attention.scale is 0.5, which kvllm does not"),
        (lambda w: w.add_expert_shared_count(1), "llama.expert_shared_count is 1, which kvllm does not support"),
        (lambda w: w.add_causal_attention(False), "is_causal is false"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "'longrope' needs short_factor"),
        (lambda w: w.add_eot_token_id(256), "eos_token_id 256, .* is not in the vocabulary"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, change: Callable[[gguf.GGUFWriter], None], message: str
) -> None:
    path = tmp_path / "model.gguf"
    make(path, "llama-tied", change=change)
    with pytest.raises(CheckpointError, match=rf"^{path}: .*{message}"):
        load_model_config(path)


def test_other_architectures_and_types_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make(path, "llama-tied", Type.Q8_0)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(
        CheckpointError, match="unsupported architecture 'mamba' .*: of GGUF files, kvllm runs cohere2,"
    ):
        load_model_config(path)
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (Type.Q8_0,)
    path.write_bytes(data[:at] + struct.pack("<I", Type.F64) + data[at + 4 :])
    with pytest.raises(
        CheckpointError, match=r"blk.0.ffn_up.weight is of type F64; kvllm reads F32, .* MXFP4: use another"
    ):
        load_model_config(path)


def test_several_models_in_a_directory(tmp_path: Path) -> None:
    for name in ("a.Q4_0.gguf", "a.Q8_0.gguf"):
        make(tmp_path / name, "qwen2")
    with pytest.raises(CheckpointError, match=r"several models, a.Q4_0.gguf, a.Q8_0.gguf: give the path of one"):
        load_model_config(tmp_path)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make(path, "qwen3")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight"))
    with pytest.raises(CheckpointError, match=r"not fit its model.gguf: it lacks model.layers.1.mlp.up_proj.weight"):
        load(path)
