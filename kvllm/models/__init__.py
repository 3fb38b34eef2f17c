"""The model families: an architecture's name in `config.json` -> the file that computes it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvllm.models.base import Family

MODELS = {
    "Cohere2ForCausalLM": "cohere2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "FalconH1ForCausalLM": "falcon_h1",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "LlamaForCausalLM": "llama",
    "Ministral3ForCausalLM": "ministral3",
    "MinistralForCausalLM": "ministral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
}

CLASSIFIER = "ForSequenceClassification"
"""How the names of architectures end whose heads score classes, in place of `ForCausalLM`."""

NOT_COMPUTED = {
    "DeepseekV2ForCausalLM": "experts that softmax chooses by groups, beside latent attention",
    "DeepseekV32ForCausalLM": "attention to tokens that an indexer chooses",
    "KimiLinearForCausalLM": "linear attention",
    "MambaForCausalLM": "state spaces",
    "Mamba2ForCausalLM": "state spaces",
    "JambaForCausalLM": "state spaces",
    "Gemma3nForCausalLM": "several residuals side by side",
}
"""What well-known architectures have that kvllm does not compute."""


def what_is_not_computed(architecture: str) -> str | None:
    """What kvllm does not compute of an architecture that is not in MODELS; None if that is not known."""
    if architecture.endswith(CLASSIFIER):
        return 'scores of classes in place of text, for runner="pooling"'
    is_multimodal = architecture.endswith("ForConditionalGeneration")
    return NOT_COMPUTED.get(architecture, "images or sound beside text" if is_multimodal else None)


def model_family(architecture: str) -> Family:
    """The `FAMILY` of an architecture's file. The file is imported when it is needed.

    architecture: a key of MODELS.
    """
    return import_module(f"{__name__}.{MODELS[architecture]}").FAMILY
