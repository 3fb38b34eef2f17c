"""A compression method together with what it is told about the model: the same in every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class WithModelInputs:
    """A method that gets `frequencies`, one of `kvllm.compression.registry.INPUTS`, in every call."""

    def __init__(self, method: Callable[..., Tensor], frequencies: Tensor) -> None:
        self.method = method
        self.frequencies = frequencies

    def __call__(self, queries: Tensor | None, keys: Tensor, **offered: Any) -> Tensor:
        return self.method(queries, keys, frequencies=self.frequencies, **offered)
