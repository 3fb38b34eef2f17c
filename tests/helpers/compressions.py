"""Compressions of the tests."""

from __future__ import annotations

from typing import Any

from kvllm import CompressionConfig
from kvllm.compression.specs import SPECS
from kvllm.config.compression import option_types
from kvllm.config.policies import POLICIES

PAPER: dict[str, Any] = {"policy": "periodic", "window_blocks": 3, "buffer": 32}


def paper_compression(**options: Any) -> CompressionConfig:
    """With the policy, windows and buffer of Kara's paper, unless others are given."""
    paper = PAPER | options
    if paper["policy"] == "threshold" and "window_blocks" not in options:
        del paper["window_blocks"]
    return CompressionConfig(**paper)


def fitting(method: str, policy: str = "periodic", **options: Any) -> dict[str, Any]:
    """Method and policy, with those of some options that they have."""
    own = option_types(policy, method)
    return {"method": method, "policy": policy} | {name: options[name] for name in own if name in options}


def refusal(method: str, policy: str) -> str | None:
    """Why a policy refuses a method; None if it does not."""
    return SPECS[method].refusal(POLICIES[policy].options_type.compresses)


def other(compression: CompressionConfig, **options: Any) -> CompressionConfig:
    """The same with other options."""
    return CompressionConfig(**compression.flat() | options)
