"""KvLLM: a paged-attention engine that compresses its KV cache while it decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvllm import log
from kvllm.config import CompressionConfig, TenantConfig, register_policy
from kvllm.core.policies import Periodic, Pressure, Standalone, Threshold
from kvllm.errors import CheckpointError, ConfigError, EngineDeadError, KvLLMError, RequestError
from kvllm.outputs import CompletionOutput, RequestOutput
from kvllm.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from kvllm.pooling.params import PoolingParams
from kvllm.prompts import TextPrompt, TokensPrompt
from kvllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from kvllm.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from kvllm.async_llm import AsyncLLM
    from kvllm.engine_args import EngineArgs
    from kvllm.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CheckpointError",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "CompressionConfig",
    "ConfigError",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineDeadError",
    "KvLLMError",
    "Periodic",
    "PoolingParams",
    "PoolingRequestOutput",
    "Pressure",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "Standalone",
    "StructuredOutputsParams",
    "TenantConfig",
    "TextPrompt",
    "Threshold",
    "TokensPrompt",
    "register_policy",
]


log.set_up()


def __getattr__(name: str) -> Any:
    # These need torch; the core, the simulator and their users do not.
    if name == "LLM":
        from kvllm.llm import LLM

        return LLM
    if name == "EngineArgs":
        from kvllm.engine_args import EngineArgs

        return EngineArgs
    if name == "AsyncLLM":
        from kvllm.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'kvllm' has no attribute {name!r}")
