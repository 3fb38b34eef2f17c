"""The model families: an architecture's name in `config.json` -> the file that computes it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvllm.models.base import Family

MODELS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def model_family(architecture: str) -> Family:
    """The `FAMILY` of an architecture's file. The file is imported when it is needed.

    architecture: a key of MODELS.
    """
    return import_module(f"{__name__}.{MODELS[architecture]}").FAMILY
