"""The model families: an architecture's name in `config.json` -> its class."""

from __future__ import annotations

from kvllm.models.llama import LlamaModel

MODELS: dict[str, type[LlamaModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
    "Qwen3ForCausalLM": LlamaModel,
}
