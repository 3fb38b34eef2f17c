"""Loads the compiled operators, the `torch.ops.kvllm` namespace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvllm.errors import KvLLMError


@functools.cache
def load_extension() -> None:
    """Load the library that `setup.py` builds beside this file.

    Raises KvLLMError if it was not built, or was built in a way this torch cannot load.
    """
    libraries = sorted(Path(__file__).parent.glob("_C.*so"))
    if not libraries:
        raise KvLLMError(
            f"the compiled extension of kvllm is missing: no _C*.so in {Path(__file__).parent}. "
            "Build it from the root of the source tree: pip install --no-build-isolation -e ."
        )
    try:
        torch.ops.load_library(libraries[0])
    except OSError as error:
        raise KvLLMError(
            f"{libraries[0]} cannot be loaded with torch {torch.__version__} (2.11 or newer is needed): {error}. "
            "Rebuild it: pip install --no-build-isolation -e ."
        ) from error


@functools.cache
def operator(name: str) -> Callable[..., Any]:
    """The compiled operator `kvllm::<name>`, looked up once."""
    load_extension()
    return getattr(torch.ops.kvllm, name).default
