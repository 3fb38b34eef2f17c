"""Loads the compiled operators, the `torch.ops.kvllm` namespace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvllm.errors import KvLLMError

OLDEST_GPU = (8, 0)
"""Compute capability, as in `CUDA_ARCHITECTURES` of setup.py. Triton's kernels do the same on older ones."""


@functools.cache
def load_extension() -> None:
    """Load the library that `setup.py` builds beside this file.

    Raises KvLLMError if it was not built, or was built in a way this torch cannot load.
    """
    libraries = _libraries("_C")
    if not libraries:
        raise KvLLMError(
            f"the compiled extension of kvllm is missing: no _C*.so in {Path(__file__).parent}. "
            "Build it from the root of the source tree: pip install --no-build-isolation -e ."
        )
    _load(libraries[0])


@functools.cache
def has_cuda_operators() -> bool:
    """Load the CUDA operators as well, if they were built and there is a GPU for them; whether there are any.

    Raises KvLLMError if they were built in a way this torch cannot load.
    """
    libraries = _libraries("_C_cuda")
    if not libraries or not torch.cuda.is_available() or torch.cuda.get_device_capability() < OLDEST_GPU:
        return False
    load_extension()
    _load(libraries[0])
    return True


def _libraries(name: str) -> list[Path]:
    return sorted(Path(__file__).parent.glob(f"{name}.*so"))


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise KvLLMError(
            f"{library} cannot be loaded with torch {torch.__version__} (2.11 or newer is needed): {error}. "
            "Rebuild it: pip install --no-build-isolation -e ."
        ) from error


@functools.cache
def operator(name: str) -> Callable[..., Any]:
    """The compiled operator `kvllm::<name>`, looked up once."""
    load_extension()
    return getattr(torch.ops.kvllm, name).default
