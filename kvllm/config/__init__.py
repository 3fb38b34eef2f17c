"""Options of the engine, validated where they enter."""

from __future__ import annotations

from kvllm.config.checks import Options, Refused, check_types, converted, require, without_refused
from kvllm.config.compression import CompressionConfig, LayerGroup, bounding, make_kv_groups
from kvllm.config.engine import EngineConfig
from kvllm.config.host_room import check_host_size, host_room
from kvllm.config.policies import PolicyOptions, register_policy
from kvllm.config.speculation import SpeculativeConfig
from kvllm.config.tenant import TenantConfig

__all__ = [
    "CompressionConfig",
    "EngineConfig",
    "LayerGroup",
    "Options",
    "PolicyOptions",
    "Refused",
    "SpeculativeConfig",
    "TenantConfig",
    "bounding",
    "check_host_size",
    "check_types",
    "converted",
    "host_room",
    "make_kv_groups",
    "register_policy",
    "require",
    "without_refused",
]
