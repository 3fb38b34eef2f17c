"""The look at kernels at the start of an engine, in Triton's interpreter: kernels as they are, and broken ones.

The interpreter must be chosen before Triton is first imported, so all runs in a process of its own.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvllm.attention.layer import LayerAttention
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from tests.helpers.processes import run_python

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")


def run_checks() -> None:
    from kvllm.attention.triton import TritonBackend
    from kvllm.worker import self_test

    attend = TritonBackend._attend
    shape = CacheShape(2, 1, 16, 64, torch.float16, scored=True)

    def check(shape: CacheShape = shape, **options: Any) -> str | None:
        backend = TritonBackend(PagedKVCache(shape, 1), 2, 0.25, (LayerAttention(**options),) * 2)
        try:
            return self_test.check_attention(backend)
        except ConfigError as error:
            return f"ConfigError: {error}"

    def broken(*args: Any) -> torch.Tensor:
        output = attend(*args)
        return output if os.environ.get("DISABLE_MMA_V3") == "1" and args[0].mends else output.roll(1, 0)

    found = [check(), check(window=200, soft_cap=5.0, sinks=True)]
    found.append(check(CacheShape(1, 1, 16, 64, torch.float32, kv_format=KV_FORMATS["int8"])))
    with patch.object(TritonBackend, "_attend", broken):
        for TritonBackend.mends in (True, False):  # type: ignore[attr-defined]
            os.environ.pop("DISABLE_MMA_V3", None)
            found.append(check())
    fails = patch.object(TritonBackend, "_attend", side_effect=torch.AcceleratorError("illegal memory access\nmore"))
    with fails:
        found.append(check())
    print(json.dumps(found))


def test_wrong_kernels_are_found() -> None:
    *right, mended, wrong, failed = run_python("run_checks()", "tests.worker.test_self_test", TRITON_INTERPRET="1")
    assert right == [None] * 3
    assert mended.startswith("Triton's attention kernels are wrong on this device (relative error 1.")
    assert mended.endswith("): they run with DISABLE_MMA_V3=1, slower")
    assert wrong.startswith("ConfigError: Triton's attention kernels are wrong on this device (relative error 1.")
    assert "illegal memory access): set DISABLE_MMA_V3=1 or DISABLE_MMA_V5=1 in the environment" in failed
