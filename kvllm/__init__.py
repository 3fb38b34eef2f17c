"""KvLLM: a paged-attention engine that compresses its KV cache while it decodes."""

from __future__ import annotations

import os
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

# oneDNN makes two primitives for every pair of a number of query tokens and a weight's shape. It keeps the last 1024 of
# them, 0.3 MiB each. Beside them, torch keeps descriptions of the last 1024 products of each thread. Varied traffic
# fills both caches, with 400 MiB in all. A quarter of the first is no slower, and neither is doing without the second.
# The sizes are read when the caches are first used. LRU_CACHE_CAPACITY=0 would crash torch.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
os.environ.setdefault("LRU_CACHE_CAPACITY", "1")


def __getattr__(name: str) -> Any:
    # LLM needs torch; the core, the simulator and their users do not.
    if name == "LLM":
        from kvllm.llm import LLM

        return LLM
    raise AttributeError(f"module 'kvllm' has no attribute {name!r}")
