"""Which KV pairs survive: the list of methods (`specs`, free of torch), and one module for each in `methods/`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvllm.compression.registry import METHODS

__all__ = ["METHODS"]


def __getattr__(name: str) -> Any:
    # The methods need torch; the core, which reads their specs, does not.
    if name == "METHODS":
        from kvllm.compression.registry import METHODS

        return METHODS
    raise AttributeError(f"module 'kvllm.compression' has no attribute {name!r}")
