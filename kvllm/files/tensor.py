"""A tensor in a file, whatever the format of the file is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class CheckpointTensor(Protocol):
    """A tensor in a file, of which nothing is read yet.

    dtype: of what is read, as safetensors calls it, such as "BF16".
    """

    @property
    def file(self) -> Path: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, rows: slice | torch.Tensor | None = None) -> torch.Tensor:
        """All values, or those of some rows: a slice of the first dimension, or indices, int64."""
        ...

    def forget(self) -> None:
        """Give back the memory of what was read; it can be read again."""
        ...
