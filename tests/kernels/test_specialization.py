"""No variant of a kernel depends on what changes from step to step: numbers of sequences, of tokens, of blocks and of
windows, and so where parts of tensors begin. Triton's own rule of what makes a variant decides; nothing is compiled.
And no step has more programs than a grid may have."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvllm.attention.base import AttentionBatch
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from tests.helpers.kernel_launches import ints, launch_batch, launch_rows, launch_windows
from tests.helpers.kernel_variants import binder_of
from tests.helpers.processes import run_python

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")

NUMBERS = (1, 2, 3, 4, 7, 13, 15, 16, 17, 31, 32, 33)
"""Triton specializes on 1 and on multiples of 16."""


def arguments_that_make_variants() -> None:
    """Print, for each kernel, the arguments that Triton specializes in several ways, and the ways."""
    from triton.runtime.interpreter import InterpretedFunction

    found: dict[str, dict[str, set[str]]] = {}

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        _, specialization, _ = binder_of(self)(*args, **kwargs)
        dtypes = [str(each.dtype) for each in args if isinstance(each, torch.Tensor)]
        constants = {name: value for name, value in kwargs.items() if not isinstance(value, torch.Tensor)}
        kernel = found.setdefault(f"{self.__name__} {dtypes} {sorted(constants.items())}", {})
        for name, of_argument in zip(self.arg_names, specialization, strict=False):
            kernel.setdefault(name, set()).add(str(of_argument))

    with patch.object(InterpretedFunction, "run", record):
        for number in NUMBERS:
            launch_batch(number)
            launch_rows(number)
            launch_windows(number, 1, 1)
    several = {
        f"{kernel.split()[0]}.{name}": sorted(ways)
        for kernel, arguments in found.items()
        for name, ways in arguments.items()
        if len(ways) > 1
    }
    print(json.dumps([len(found), several]))


def test_one_variant_over_a_sweep_of_shapes() -> None:
    number, several = run_python("arguments_that_make_variants()", __name__, TRITON_INTERPRET="1")
    assert number > 40  # kernels with different constants
    assert several == {}


def grids_of_a_long_chunk() -> None:
    """Print the grids of a chunk whose query tokens are a tile each, since a KV head has many query heads."""
    from triton.runtime.interpreter import InterpretedFunction

    from kvllm.attention.triton import TritonBackend

    grids = []
    num_tokens, num_heads, head_dim = 70_000, 71, 64
    cache = PagedKVCache(CacheShape(1, 1, head_dim, 256, torch.bfloat16), 1)
    queries = torch.zeros(1, num_heads, head_dim, dtype=torch.bfloat16).expand(num_tokens, -1, -1)
    batch = AttentionBatch(torch.tensor([0, num_tokens], dtype=torch.int32), ints(num_tokens), ints(1, 274))
    with patch.object(InterpretedFunction, "run", lambda *_, grid, **__: grids.append(grid)):
        backend = TritonBackend(cache, num_heads, 0.1)
        backend.run(0, queries, backend.plan(batch))
    print(json.dumps(grids))


def test_grids_are_no_larger_than_cuda_allows() -> None:
    grids = run_python("grids_of_a_long_chunk()", __name__, TRITON_INTERPRET="1")
    assert all(programs < 1 << 16 for _, *others in grids for programs in others), grids
    assert max(programs for programs, *_ in grids) >= 70_000
