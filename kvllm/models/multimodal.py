"""Multimodal checkpoints whose text model is of a family here: its config, and its tensors by their names there.

What encodes images is not read: a text without them is computed as by the text model alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from kvllm.errors import CheckpointError
from kvllm.files.text_names import text_name

TEXT_TYPES = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
"""Architectures, and the `model_type` of the text model where the config does not say it."""
QWEN2_VL: dict[str, Any] = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6}
TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": ("Gemma3ForCausalLM", {}),
    "gemma4_text": ("Gemma4ForCausalLM", {}),
    "ministral3": ("Ministral3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2_vl_text": ("Qwen2ForCausalLM", QWEN2_VL),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", QWEN2_VL),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {}),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 5e5}),
}
"""The architecture that a text model is, and keys that mean something else there where they are absent."""
OF_BOTH = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")
"""Keys that stand beside `text_config`, too."""
Value = TypeVar("Value")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of the text model of a multimodal checkpoint; that of any other as it is.

    Raises CheckpointError for text models that kvllm does not compute.
    """
    named = config.get("architectures")
    around = [name for name in TEXT_TYPES if isinstance(named, list) and name in named]
    if not around:
        return config
    given = config.get("text_config")
    text = dict(given if isinstance(given, dict) else config)  # older ones of Qwen have the keys side by side
    kind = text.get("model_type") if given else None
    kind = TEXT_TYPES[around[0]] if kind is None else kind
    if not isinstance(kind, str) or kind not in TEXT_MODELS:
        raise CheckpointError(
            f"text_config has model_type {kind!r:.80}: of {around[0]}, kvllm runs those with {', '.join(TEXT_MODELS)}"
        )
    architecture, defaults = TEXT_MODELS[kind]
    shared = {key: config[key] for key in OF_BOTH if config.get(key) is not None}
    outer = defaults | shared  # a null gives way to these; elsewhere it may say more than its absence
    found = outer | {key: value for key, value in text.items() if value is not None or key not in outer}
    tied = [each.get("tie_word_embeddings") for each in (config, text)]
    if tied != [None, None]:
        found["tie_word_embeddings"] = True in tied
    found |= {"architectures": [architecture], "model_type": None, "text_of": around[0]}
    return _with_plain_rope(found, "rope_theta" in defaults and "rope_theta" not in text)


def text_tensors(found: Mapping[str, Value]) -> dict[str, Value]:
    """Those of the text model, by the names that they have in it."""
    return {text: found[name] for name in found if (text := text_name(name)) is not None}


def _with_plain_rope(config: dict[str, Any], is_default: bool) -> dict[str, Any]:
    """With one position for each token: the three of Qwen's, of which images alone have different ones, are equal."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if isinstance(rope, dict):
            rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
            rope |= {key: "default" for key in ("type", "rope_type") if rope.get(key) == "mrope"}
            config[name] = rope
            if is_default and "rope_theta" in rope:
                config.pop("rope_theta", None)
    return config
