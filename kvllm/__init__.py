"""KvLLM: a paged-attention engine that compresses its KV cache while it decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvllm import log
from kvllm.config import CompressionConfig
from kvllm.errors import CheckpointError, ConfigError, KvLLMError, RequestError
from kvllm.outputs import CompletionOutput, RequestOutput
from kvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvllm.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "CompressionConfig",
    "ConfigError",
    "KvLLMError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]


log.set_up()


def __getattr__(name: str) -> Any:
    # LLM needs torch; the core, the simulator and their users do not.
    if name == "LLM":
        from kvllm.llm import LLM

        return LLM
    raise AttributeError(f"module 'kvllm' has no attribute {name!r}")
