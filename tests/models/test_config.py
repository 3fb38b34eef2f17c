"""config.json and generation_config.json: they are read as transformers reads them, or refused."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvllm.engine_args import EngineArgs
from kvllm.errors import CheckpointError, ConfigError
from kvllm.models import MODELS, model_family
from kvllm.models.config import ModelConfig, load_model_config
from kvllm.models.rotary import rotary_table
from tests.helpers.checkpoints import LINEAR, LLAMA3, SIZES, edit, make_checkpoint
from tests.helpers.examples import examples
from tests.helpers.families import FAMILIES, GRANITE4

CPU = torch.device("cpu")


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1 + i / 32 for i in range(32)],
    "long_factor": [1 + i / 4 for i in range(32)],
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128}
ROPES = {
    "default": {"rope_type": "default"},
    "llama3": LLAMA3,
    "linear": LINEAR,
    "yarn": YARN,
    "yarn with ends between channels": {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with a given factor": {**YARN, "attention_factor": 1.5},
    "yarn with scales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn, the pretraining length is the longest": {key: YARN[key] for key in ("rope_type", "rope_theta", "factor")},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
    "longrope": LONGROPE,
    "longrope with a given factor": {**LONGROPE, "factor": 16.0},
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotations_equal_transformers(tmp_path: Path, rope: str) -> None:
    """A long text, and one that is not longer than those of the pretraining. transformers rounds a dynamic base to 32
    bits."""
    theirs = make_checkpoint(tmp_path, "llama", head_dim=64, rope_parameters=ROPES[rope])
    config = load_model_config(tmp_path)
    for length in (20_000, 60):
        cos, sin = theirs.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
        expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), 1)
        atol = 2e-3 if rope == "dynamic" else 1e-6
        torch.testing.assert_close(rotary_table(config, length, CPU), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_a_quarter_of_each_head_is_rotated_if_nothing_is_said(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, **FAMILIES[family])
    edit(tmp_path, partial_rotary_factor=..., rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert load_model_config(tmp_path).rope.partial_factor == 0.25


def test_a_factor_of_yarn_for_other_programs(tmp_path: Path) -> None:
    """DeepSeek-R1-0528-Qwen3-8B has an attn_factor that leaves scores as they are: transformers does not read it."""
    undone = 1 / (0.1 * math.log(4) + 1)
    make_config(tmp_path, "llama", rope_parameters={**YARN, "attn_factor": undone}, head_dim=64)
    scaling = load_model_config(tmp_path).rope.scaling
    assert scaling is not None and scaling.attention_factor == pytest.approx(1)
    make_config(tmp_path, "llama", rope_parameters={**LINEAR, "attn_factor": 0.5}, head_dim=64)
    with pytest.raises(CheckpointError, match="'linear' has attn_factor, which kvllm knows of 'yarn' alone"):
        load_model_config(tmp_path)


def test_scalings_for_longer_texts_allow_them(tmp_path: Path) -> None:
    """As vLLM derives max_model_len. LINEAR divides by 2.5, and Gemma 3 has the longest text in its config already."""
    lengths = [(YARN, 512), ({**YARN, "factor": 9.0}, 1152), (ROPES["dynamic"], 1536), (LONGROPE, 512), (LINEAR, 1280)]
    for rope, longest in lengths:
        make_config(tmp_path, "llama", rope_parameters=rope, head_dim=64)
        assert load_model_config(tmp_path).max_position_embeddings == longest
    edit(tmp_path, rope_parameters=..., rope_scaling={"type": "linear", "factor": 4}, max_position_embeddings=4096)
    assert EngineArgs(tmp_path).engine_config.max_model_len == 16384
    assert EngineArgs(tmp_path, max_model_len=16384).model_config.rope.theta == 10000.0
    with pytest.raises(ConfigError, match="max_position_embeddings=16384"):
        _ = EngineArgs(tmp_path, max_model_len=16385).model_config
    gemma3 = {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"full_attention": LINEAR}}
    make_config(tmp_path, "gemma3_text", **gemma3)
    assert load_model_config(tmp_path).max_position_embeddings == 512


def test_rope_keys_of_older_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", rope_parameters=LLAMA3)
    new = load_model_config(tmp_path)
    old = {key: value for key, value in LLAMA3.items() if key not in ("rope_type", "rope_theta")}
    edit(tmp_path, rope_parameters=..., rope_theta=500, rope_scaling={"type": "llama3", **old})
    edit(tmp_path, dtype=..., torch_dtype="float32")
    assert load_model_config(tmp_path) == new
    edit(tmp_path, rope_scaling=None, torch_dtype="bfloat16", rope_theta=...)
    plain = load_model_config(tmp_path)
    assert (plain.rope.scaling, plain.rope.theta, plain.dtype) == (None, 10000.0, "bfloat16")


LLAMA3_BARE = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
TOP_THETAS = (..., 10000.0, 500.0)
ROPE_PARAMETERS = (..., {}, {"rope_type": "default", "rope_theta": 500.0}, {"rope_theta": 500.0}, LINEAR, LLAMA3, YARN)
ROPE_SCALINGS = (
    ...,
    None,
    {"type": "default"},
    {"type": "linear", "factor": 2.5},
    {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0},
    LLAMA3_BARE,
    LLAMA3,
    {**YARN, "type": "yarn"},
)


def test_rope_keys_are_computed_as_transformers_does_or_refused(tmp_path: Path) -> None:
    """All combinations of the three keys. transformers drops keys that contradict what it computes."""
    make_checkpoint(tmp_path, "llama", head_dim=64)
    computed = 0
    for theta, parameters, scaling in itertools.product(TOP_THETAS, ROPE_PARAMETERS, ROPE_SCALINGS):
        keys = {"rope_theta": theta, "rope_parameters": parameters, "rope_scaling": scaling}
        edit(tmp_path, **keys)
        try:
            config = load_model_config(tmp_path)
        except CheckpointError:
            continue
        computed += 1
        theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
        cos, sin = theirs(torch.zeros(1), torch.arange(100)[None])
        expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), 1)
        torch.testing.assert_close(rotary_table(config, 100, CPU), expected, atol=1e-6, rtol=0, msg=str(keys))
    assert computed == 71


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope_parameters": LINEAR, "rope_scaling": YARN}, "contradict each other"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": LINEAR}, "rope_scaling .* contradict each other"),
        ({"rope_theta": 1e6, "rope_scaling": LINEAR}, "rope_theta is 10000.0 in one place and 1000000.0 in another"),
        ({"rope_theta": 0}, "rope_theta is 0.0, but must be a positive number"),
        ({"rope_parameters": {"rope_theta": -5}}, "rope_theta is -5.0, but must be a positive number"),
        ({"rope_parameters": {"rope_theta": "5"}}, "rope_parameters: Expected `float | null`, got `str`"),
        ({"rope_parameters": {"type": "linear", "rope_type": "default"}}, "rope_type is 'default' in one place"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, "unsupported rope type .'linear'."),
        ({"rope_parameters": {"full_attention": LINEAR}}, "rope_parameters has full_attention, which kvllm does not"),
        ({"rope_parameters": {**LINEAR, "mrope_section": [2, 3, 3]}}, "rope_parameters has mrope_section, which"),
        (
            {"rope_parameters": LLAMA3, "original_max_position_embeddings": 32},
            "original_max_position_embeddings is 64 in one place and 32 in another",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_refused_rope_keys(tmp_path: Path, qwen3: Path, changes: dict[str, Any], message: str) -> None:
    assert_refused(tmp_path, qwen3, {"rope_parameters": ..., **changes}, message)


SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS: dict[str, tuple[dict[str, Any], list[int | None]]] = {
    "mistral, absent": ({"sliding_window": ...}, [4096] * 3),
    "mistral, absent, short texts": ({"sliding_window": ..., "max_position_embeddings": 4096}, []),
    "mistral, null": ({"sliding_window": None}, []),
    "mistral, one too short": ({"sliding_window": 4999}, [4999] * 3),
    "mistral, just long enough": ({"sliding_window": 5000}, []),
    "mistral, layers that it ignores": ({"sliding_window": 8, "layer_types": [FULL] * 3}, [8] * 3),
    "mistral, a switch that it ignores": ({"sliding_window": 8, "use_sliding_window": False}, [8] * 3),
    "llama, switched off": ({"sliding_window": 8, "use_sliding_window": False}, []),
    "llama, no layer": ({"sliding_window": 8, "layer_types": [FULL] * 3}, []),
    "qwen2, absent": ({"sliding_window": ..., "use_sliding_window": True, "max_window_layers": 0}, [4096] * 3),
    "qwen2, switched off": ({"sliding_window": 8, "max_window_layers": 0}, []),
    "qwen2, null": ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, []),
    "qwen2, beyond the last layer": ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, []),
    "qwen3, last layer": (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        [None, None, 8],
    ),
    "qwen3, named layers": (
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING]},
        [8, None, 8],
    ),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_of_layers(tmp_path: Path, case: str) -> None:
    """None where the last of `max_position_embeddings` tokens attends all of them."""
    changes, expected = WINDOWS[case]
    make_config(tmp_path, case.split(",")[0], max_position_embeddings=5000, layer_types=...)
    edit(tmp_path, **changes)
    assert [layer.window for layer in load_model_config(tmp_path).layers] == expected


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sliding_window": 8}, "some layers attend only a sliding window .of 8 tokens"),
        ({"sliding_window": 8, "layer_types": [FULL, FULL, SLIDING]}, "some layers attend only a sliding window"),
        ({"sliding_window": 0}, "sliding_window is 0, but must be at least 1"),
        ({"sliding_window": None, "layer_types": [FULL, FULL, SLIDING]}, "but sliding_window is not given"),
        ({"layer_types": [FULL]}, "layer_types names 1 layers, but num_hidden_layers is 3"),
        ({"layer_types": [FULL, FULL, "linear_attention"]}, "layer_types has 'linear_attention'"),
    ],
)
def test_refused_windows(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """transformers applies Llama's window to cached tokens alone."""
    make_config(tmp_path, "llama", layer_types=...)
    edit(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_absent_keys_mean_what_they_mean_in_transformers(tmp_path: Path, family: str) -> None:
    keys = {"num_attention_heads": 64, "hidden_size": 2048, "num_key_value_heads": ..., "sliding_window": None}
    make_config(tmp_path, family, **keys, head_dim=..., rms_norm_eps=..., tie_word_embeddings=..., rope_parameters=...)
    theirs, ours = AutoConfig.from_pretrained(tmp_path), load_model_config(tmp_path)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, head_dim)
    assert (ours.rms_norm_eps, ours.tie_word_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


def make_config(path: Path, family: str, **changes: Any) -> None:
    """The config.json of a tiny model; changes: as for `edit`."""
    model = AutoConfig.for_model(family, **SIZES)
    model.architectures = [f"{family.capitalize()}ForCausalLM"]
    model.save_pretrained(path)
    edit(path, **changes)


def test_a_config_of_a_model_without_its_head(tmp_path: Path) -> None:
    """It names the base class: the head is the embedding, or is needed. Not all of such names are one."""
    for architecture in MODELS:
        family = model_family(architecture).model_type
        base = transformers.MODEL_MAPPING[getattr(transformers, architecture).config_class].__name__
        needed = GRANITE4 if family == "granitemoehybrid" else {"layer_types": GRANITE4["layer_types"]}
        make_config(tmp_path, family, architectures=[base], rope_parameters=..., per_layer_config=..., **needed)
        assert load_model_config(tmp_path).architecture == architecture
    edit(tmp_path, architectures=["Gemma3Model"], model_type="gemma3")
    with pytest.raises(CheckpointError, match="unsupported architecture Gemma3Model"):
        load_model_config(tmp_path)


def test_every_architecture_has_a_family() -> None:
    """Each under the names that transformers has for it."""
    for architecture in MODELS:
        assert getattr(transformers, architecture).config_class.model_type == model_family(architecture).model_type


@pytest.mark.parametrize(
    "generation, expected",
    [(None, (5,)), ({}, (5,)), ({"eos_token_id": 7}, (7, 5)), ({"eos_token_id": [7, 5, 9]}, (7, 5, 9))],
)
def test_eos_tokens(tmp_path: Path, qwen3: Path, generation: Any, expected: tuple[int, ...]) -> None:
    """Those of both files."""
    shutil.copy(qwen3 / "config.json", tmp_path)
    edit(tmp_path, eos_token_id=5)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_model_config(tmp_path).eos_token_ids == expected
    edit(tmp_path, eos_token_id=[5])
    assert load_model_config(tmp_path).eos_token_ids == expected
    edit(tmp_path, eos_token_id=None)
    of_generation = {(5,): (), (7, 5): (7,)}.get(expected, expected)
    assert load_model_config(tmp_path).eos_token_ids == of_generation


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"architectures": ["FooForCausalLM"]},
            "unsupported architecture FooForCausalLM: kvllm runs .*Qwen3ForCausalLM",
        ),
        ({"architectures": ...}, "none named"),
        ({"hidden_size": ...}, "missing required field `hidden_size`"),
        ({"hidden_size": "64"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, but must be at least 1"),
        ({"num_attention_heads": 7}, "num_attention_heads 7 is not a multiple of num_key_value_heads 2"),
        ({"num_attention_heads": 6, "head_dim": None}, "hidden_size 64 is not a multiple of num_attention_heads 6"),
        ({"head_dim": 15}, "head_dim is 15, but rotary embedding needs a positive even number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' instead of 'silu'"),
        ({"mlp_bias": True}, "MLP projections have a bias"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types names 2 layers, but num_hidden_layers"),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 8},
            "layer_types has 'sliding_attention', but use_sliding_window is false",
        ),
        ({"quantization_config": {"quant_method": "gguf"}}, "quantized by 'gguf': kvllm computes .* one that is not"),
        ({"quantization_config": {"quant_method": "gptq"}}, "missing required field `bits`"),
        ({"rope_parameters": {"rope_type": "xpos"}}, "rope type 'xpos': kvllm computes default, linear, dynamic"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic' needs factor"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' needs factor, a positive number"),
        ({"rope_parameters": {**YARN, "rope_theta": 1}}, "rope type 'yarn' needs a rope_theta above 1, but has 1.0"),
        ({"rope_parameters": {**YARN, "attention_factor": -1}}, "attention_factor is -1.0, but must be a positive"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' needs short_factor, a list of positive numbers"),
        ({"rope_parameters": LONGROPE}, "short_factor has 32 numbers, but 16 rotated channels need 8"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' needs factor, a positive number"),
        (
            {"rope_parameters": {**LLAMA3, "low_freq_factor": 4}},
            "low_freq_factor 4.* must be below high_freq_factor 4.0",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"dtype": "int8"}, "unsupported dtype 'int8': kvllm reads bfloat16, float16, float32"),
    ],
)
def test_refused_configs(tmp_path: Path, qwen3: Path, changes: dict[str, Any], message: str) -> None:
    assert_refused(tmp_path, qwen3, changes, message)


@pytest.mark.parametrize(
    "family, message",
    [
        ("arcee", "the nearest is M.*: hidden_act is 'relu2' instead of 'silu', which kvllm does not support"),
        ("gemma", "the nearest is Gemma2ForCausalLM: it reads all keys. Whether they are one, only their code says"),
        ("granitemoe", "the nearest is GraniteForCausalLM: it does not read num_local_experts, num_experts_per_tok"),
        ("qwen2_moe", "the nearest is Qwen3_5MoeForCausalLM: it does not read qkv_bias"),
        ("deepseek_v2", "which has experts that softmax chooses .*nearest is DeepseekV3ForCausalLM: it does not read"),
        ("llava", "has images .* nearest is .*: it "),
    ],
)
def test_the_nearest_family_of_a_config_that_is_refused(tmp_path: Path, family: str, message: str) -> None:
    """As transformers writes it, all keys with their defaults."""
    config = AutoConfig.for_model(family)
    config.architectures = [
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), transformers.LlavaForConditionalGeneration).__name__
    ]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(CheckpointError, match=rf"unsupported architecture .*{message}"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    "family, changes, message",
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 numbers, but num_hidden_layers is 5"),
        ("smollm3", {"no_rope_layer_interval": 0, "no_rope_layers": ...}, "interval is 0, but must be at least 1"),
        ("cohere2", {"sliding_window_pattern": 0, "layer_types": ...}, "pattern is 0, but must be at least 1"),
        ("cohere2", {"sliding_window": None, "layer_types": ...}, "but sliding_window is not given"),
        ("cohere2", {"logit_scale": 0}, "logit_scale is 0.0, but must be at least 0.0001 and at most 10000"),
        (
            "olmo3",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters has rope_type, beside those of full_",
        ),
        (
            "glm4-moe",
            {"n_group": 3},
            "n_group is 3 and topk_group 1, but must be groups of at least 2 of the 8 experts",
        ),
        ("glm4-moe", {"n_shared_experts": 0}, "n_shared_experts is 0: an MLP for all tokens of 0 columns"),
        (
            "mistral3-images",
            {"text_config": {"model_type": "mamba"}},
            "text_config has model_type 'mamba': of Mistral3F",
        ),
        ("lfm2", {"conv_bias": True}, "conv_bias is true: convolutions have a bias"),
        ("lfm2", {"conv_L_cache": 1}, "a convolution sees 1 tokens, but must see 2 to 32"),
        ("lfm2", {"layer_types": ["conv"] * 5}, "no layer has attention"),
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of 0, which kvllm does not support"),
        ("lfm2-moe", {"use_expert_bias": False}, "use_expert_bias is false: experts are chosen without a bias"),
        ("falcon-h1", {"mamba_n_groups": 3}, "4 Mamba-2 heads of 12 numbers in 3 groups cannot share 48 channels"),
        ("falcon-h1", {"mamba_d_state": 4096}, "key_dim of Mamba-2 heads is 4096, but must be 1 to 1024"),
        ("falcon-h1", {"mamba_proj_bias": True}, "mamba_proj_bias is true: projections of Mamba-2 heads have a bias"),
        ("falcon-h1", {"time_step_limit": [0.001, 0.1]}, r"time_step_limit is \[0.001, 0.1\]: steps have bounds"),
        ("falcon-h1", {"time_step_limit": [0.0, 0.4]}, r"time_step_limit is \[0.0, 0.4\]: steps have bounds"),
        ("falcon-h1", {"lm_head_multiplier": 0}, "lm_head_multiplier is 0.0, but must be at least"),
        ("gemma4", {"enable_moe_block": True}, "num_experts is 0, but must be at least 1"),
        ("gemma4", {"num_kv_shared_layers": 4}, "those before have not all kinds of layer_types"),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5 of 5 layers"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config is given"),
        ("gemma4", {"per_layer_config": ..., "global_head_dim": 24}, "neither size is a multiple of the other"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "tokens attend to those after them, too"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0.0, but must be at least 0.0001 and at most"),
        ("granite4", {"layer_types": ...}, "layer_types is not given, so that all layers are Mamba layers"),
        ("deepseek-v3", {"topk_group": 1}, "num_experts_per_tok is 3, more than 1 of 4 groups have"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave is false"),
        ("deepseek-v3", {"kv_lora_rank": 0}, "the sizes of latent attention are .* but must be at least 1"),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is .* for each of 3 layers"),
        ("granite4", {"num_local_experts": 4}, "num_local_experts is 4: experts beside an MLP for all tokens"),
        ("granite4", {"position_embedding_type": "learned"}, "position_embedding_type is 'learned' instead of 'rope'"),
    ],
)
def test_refused_keys_of_families(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    make_checkpoint(tmp_path / "accepted", **FAMILIES[family])
    assert_refused(tmp_path, tmp_path / "accepted", changes, message)


ONE_HEAD = {"head_dim": None, "num_attention_heads": 1, "num_key_value_heads": 1}
MANY_LAYERS = {"num_hidden_layers": 1024, "layer_types": ...}


def assert_refused(path: Path, source: Path, changes: dict[str, Any], message: str) -> None:
    """The config.json of `source` is accepted, and with `changes` it is not."""
    shutil.copy(source / "config.json", path)
    load_model_config(path)
    edit(path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": 5}, "architectures is 5, but must be a list of names"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures is 'Qwen3ForCausalLM', but must be a list of names"),
        ({"architectures": [5]}, "unsupported architecture 5"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000, but must be at least 1 and at most 262144"),
        ({"vocab_size": 2**62}, "vocab_size is 4611686018427387904, but must be at least 1 and at most"),
        ({"head_dim": 10**6}, "head_dim is 1000000, but must be at least 1 and at most"),
        ({**ONE_HEAD, "hidden_size": 1 << 18}, "head_dim is 262144, but must be at least 1 and at most 2048"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be at least 1 and at most 1024"),
        ({"intermediate_size": 2**70}, "intermediate_size is 1180591620717411303424, but must be"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000, but must be"),
        ({"num_attention_heads": -8}, "num_attention_heads is -8, but must be at least 1"),
        ({"num_key_value_heads": -2}, "not a multiple of num_key_value_heads -2"),
        ({"hidden_size": 64.0}, "Expected `int`, got `float`"),
        ({"vocab_size": True}, "Expected `int`, got `bool`"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, but must be at least 0"),
        ({"rms_norm_eps": float("nan")}, "Expected `float`, got `object`"),
        ({**MANY_LAYERS, "hidden_size": 1 << 18, "intermediate_size": 1 << 20}, "imply .* weights, more than the"),
        ({**MANY_LAYERS, "num_attention_heads": 2048, "num_key_value_heads": 2048}, "for the keys and values of one"),
        ({"eos_token_id": 256}, "eos_token_id 256, .* is not in the vocabulary: .* below vocab_size 256"),
        ({"eos_token_id": [2, -1]}, "eos_token_id -1, .* is not in the vocabulary"),
        ({"bos_token_id": 2**70}, "bos_token_id 1180591620717411303424, .* is not in the vocabulary"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, but num_hidden_layers is 3"),
        ({"layer_types": ["full_attention", "mamba", "mamba"]}, "layer_types has 'mamba', which kvllm does not"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2' instead of 'qwen3', that of Qwen3ForCausalLM"),
        ({"is_causal": False}, "is_causal is false"),
        ({"is_causal": None}, "Expected `bool`, got `null`"),
        ({"attention_chunk_size": 8}, "attention_chunk_size is 8"),
        ({"kv_sharing_modes": ["none", "reuse", "none"]}, "kv_sharing_modes is given"),
        ({"per_layer_config": {"2": {"intermediate_size": 8}}}, "per_layer_config is given"),
    ],
)
def test_refused_sizes_and_forms(tmp_path: Path, qwen3: Path, changes: dict[str, Any], message: str) -> None:
    assert_refused(tmp_path, qwen3, changes, message)


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([-1, 0, 1, 2, 2**31, 2**63])
    | st.floats()
    | st.sampled_from(["silu", "linear", "full_attention", "sliding_attention", "float32", "LlamaForCausalLM"])
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
READ_KEYS = sorted(
    {key for name in MODELS for key in model_family(name).keys.__struct_encode_fields__} | {"architectures"}
)
ROPE_KEYS = ["rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"]
CHANGES = st.dictionaries(
    st.sampled_from(READ_KEYS), ANY_JSON | st.dictionaries(st.sampled_from(ROPE_KEYS), ANY_JSON), max_size=3
)


GENERATION = ANY_JSON | st.dictionaries(st.sampled_from(["bos_token_id", "eos_token_id"]), ANY_JSON)


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=CHANGES, generation=GENERATION)
def test_any_config_is_read_or_refused(tmp_path: Path, qwen3: Path, changes: Any, generation: Any) -> None:
    """No other error than CheckpointError; and what is read can be sent to another process."""
    shutil.copy(qwen3 / "config.json", tmp_path)
    edit(tmp_path, **changes)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    try:
        config = load_model_config(tmp_path)
    except CheckpointError:
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ModelConfig) == config


def test_infinity_as_transformers_writes_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **FAMILIES["falcon-h1"])
    expected = load_model_config(tmp_path)
    edit(tmp_path, time_step_limit=[0.0, math.inf])
    assert "[0.0, Infinity]" in (tmp_path / "config.json").read_text()
    assert load_model_config(tmp_path) == expected


@pytest.mark.parametrize("content", ["[]", "5", '{"eos_token_id": "2"}', '{"eos_token_id": [2.5]}', "{", "[" * 100_000])
def test_malformed_generation_configs(tmp_path: Path, qwen3: Path, content: str) -> None:
    shutil.copy(qwen3 / "config.json", tmp_path)
    load_model_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match="generation_config.json"):
        load_model_config(tmp_path)


def test_missing_and_malformed_configs(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent is not a directory"):
        load_model_config(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="has no config.json"):
        load_model_config(tmp_path)
    deep = '{"per_layer_config": ' + "[" * 100_000
    for content, message in (
        ("{", "not valid JSON"),
        ("[]", "must have an object"),
        ("\xff", "not valid JSON"),
        (deep, "not valid JSON"),
        ('{"architectures": ["LlamaForCausalLM"], "hidden_size": 1e999}', "Expected `int`, got `float`"),
    ):
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(CheckpointError, match=message):
            load_model_config(tmp_path)
