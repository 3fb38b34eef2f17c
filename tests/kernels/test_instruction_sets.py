"""The operators for CPUs with every instruction set that this processor has."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvllm._extension import operator
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.hadamard import hadamard, torch_hadamard
from kvllm.kvcache.ops.cpu import CpuOperations
from kvllm.kvcache.ops.plain import TorchOperations
from kvllm.models import elementwise
from tests.helpers import group_checks, product_checks, recurrent_checks
from tests.helpers.attention_cases import (
    MIXED,
    assert_bits_of_a_row_do_not_depend_on_the_batch,
    assert_bits_of_sums_that_cancel,
    assert_later_entries_stay_hidden,
    assert_matches_dense,
    make_case,
    make_ragged_case,
)
from tests.helpers.caches import head_dim_for
from tests.helpers.elementwise_checks import (
    EPS,
    assert_activations_of_extreme_gates,
    assert_bfloat16_rounds_to_even,
    assert_bits_of_a_row_do_not_depend_on_the_others,
    assert_gated_activations,
    assert_most_likely_is_argmax,
    assert_norms_with_weights_of_float32,
    assert_rotary_in_bfloat16,
)
from tests.helpers.event_checks import (
    assert_choices,
    assert_key_differences,
    assert_key_resemblance,
    assert_order_of_special_scores,
)
from tests.helpers.exchange_checks import assert_exchanges
from tests.helpers.key_score_checks import assert_scores
from tests.helpers.tensors import assert_same_rounding, randn

LEVELS = ["baseline", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
if platform.machine() == "aarch64":
    LEVELS = ["baseline", "arm_bf16"]


def check_attention() -> None:
    """Run in a process of its own for each instruction set."""
    for dtype in (torch.float32, torch.bfloat16):
        for head_dim, group, block_size in ((4, 3, 3), (48, 2, 16), (64, 4, 16), (80, 1, 256), (128, 8, 16)):
            case = make_case(MIXED, head_dim=head_dim, group=group, block_size=block_size, dtype=dtype)
            assert_matches_dense(case, "cpu")
            evicted_mask = make_ragged_case(head_dim=head_dim, group=group, block_size=block_size, dtype=dtype)
            assert_matches_dense(evicted_mask, "cpu")
        for group in (1, 3, 4):
            assert_bits_of_a_row_do_not_depend_on_the_batch(group, dtype)
        assert_bits_of_sums_that_cancel(dtype)
        assert_later_entries_stay_hidden(dtype)


def check_quantized_cache() -> None:
    """Run in a process of its own for each instruction set."""
    for dtype, tolerance in ((torch.float32, 2e-4), (torch.bfloat16, 2e-2)):
        assert_same_rotations(dtype)
        for number, name in enumerate(KV_FORMATS):
            shapes = ((32, 3, 3), (64, 4, 16), (96, 1, 256), (128, 8, 16), (256, 2, 1))
            for head_dim, group, block_size in (shapes[number % 5], shapes[(number + 2) % 5]):  # each with some formats
                sizes = {"head_dim": head_dim, "group": group, "block_size": block_size}
                assert_matches_dense(make_case(MIXED, dtype=dtype, kv_cache_dtype=name, **sizes), "cpu", tolerance)
            assert_matches_dense(make_ragged_case(dtype=dtype, kv_cache_dtype=name), "cpu", tolerance)
            assert_bits_of_a_row_do_not_depend_on_the_batch(3, dtype, kv_cache_dtype=name)
            assert_same_codes(name, dtype)
        for name in (None, *KV_FORMATS):
            assert_scores(CpuOperations, name, dtype, num_tokens=23, group=3, block_size=16)


def assert_same_rotations(dtype: torch.dtype) -> None:
    """The operator adds in the order of plain torch. Vectors may be views of others."""
    for size in (32, 64, 128, 256):
        vectors = randn(3, 2, 7, size + 8, dtype=dtype)[..., 4:-4].transpose(1, 2)
        assert torch.equal(hadamard(vectors), torch_hadamard(vectors))


def assert_same_codes(name: str, dtype: torch.dtype) -> None:
    """The operators quantize as the formulas in torch do, bit for bit."""
    head_dim = head_dim_for(name, 96)
    caches = [PagedKVCache(CacheShape(1, 2, head_dim, 4, dtype, kv_format=KV_FORMATS[name]), 8) for _ in range(2)]
    vectors = randn(32, 2, head_dim, dtype=dtype) * torch.logspace(-6, 6, 32, dtype=dtype)[:, None, None]
    vectors[3], vectors[4] = 0, -2.5
    for make, cache in zip((CpuOperations, TorchOperations), caches, strict=True):
        make(cache).store(0, vectors, vectors.flip(0), torch.arange(32))
    assert torch.equal(*(cache.data.view(torch.uint8) for cache in caches))


def check_elementwise() -> None:
    """Run in a process of its own for each instruction set."""
    for dtype in (torch.float32, torch.bfloat16):
        x, residual = randn(20, 143, dtype=dtype), randn(20, 143, dtype=dtype, seed=1)
        weight = randn(143, dtype=dtype, seed=2)
        assert_same_rounding(elementwise.rms_norm(x, weight, EPS), elementwise.torch_rms_norm(x, weight, EPS))
        expected = elementwise.torch_add_rms_norm(residual.clone(), x, weight, EPS)
        assert_same_rounding(elementwise.add_rms_norm(residual, x, weight, EPS), expected)
        assert_gated_activations(11, 143, dtype)
        assert_most_likely_is_argmax(dtype)
    assert_activations_of_extreme_gates()
    recurrent_checks.assert_all(operator("short_convolution"), operator("gated_delta_rule"))
    for kv_heads in (0, 2):
        for weights_dtype in (None, torch.bfloat16, torch.float32):
            assert_rotary_in_bfloat16(kv_heads, weights_dtype)
    assert_norms_with_weights_of_float32()
    assert_bits_of_a_row_do_not_depend_on_the_others()
    assert_bfloat16_rounds_to_even()


def check_products() -> None:
    """Run in a process of its own for each instruction set."""
    torch.manual_seed(0)
    for check in product_checks.CHECKS:
        for dtype in (torch.float32, torch.bfloat16):
            for bits in (8, 4):
                check(dtype, bits)
    for dtype in (torch.float32, torch.bfloat16):
        group_checks.assert_all(dtype)


def check_exchanges() -> None:
    """Run in a process of its own for each instruction set."""
    for seed, limit in enumerate((None, 0.05, 0.3, 0.9)):
        for pairs in ((1, 1), (15, 90), (77, 16), (200, 170)):
            assert_exchanges(seed, (3, 2, 2, 2), pairs, most=20, limit=limit, has_sinks=seed % 2 == 1)


def check_events() -> None:
    """Run in a process of its own for each instruction set."""
    for count in (1, 2, 16, 17, 80, 333):
        for levels in (1, 3, 100_000):
            assert_choices(count, levels)
    assert_order_of_special_scores()
    for dtype in (torch.float32, torch.bfloat16):
        assert_key_differences(dtype)
        assert_key_resemblance(dtype)


@pytest.mark.parametrize("isa", LEVELS)
def test_every_instruction_set(isa: str) -> None:
    script = (
        "import sys\n"
        "import torch\n"
        "from kvllm._extension import operator\n"
        "print(operator('cpu_isa')())\n"
        f"if operator('cpu_isa')() != '{isa}': sys.exit()\n"
        "from tests.kernels import test_instruction_sets\n"
        "test_instruction_sets.check_attention()\n"
        "test_instruction_sets.check_quantized_cache()\n"
        "test_instruction_sets.check_elementwise()\n"
        "test_instruction_sets.check_products()\n"
        "test_instruction_sets.check_exchanges()\n"
        "test_instruction_sets.check_events()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "KVLLM_CPU_ISA": isa, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    if result.stdout.strip() != isa:
        pytest.skip(f"this processor stops at {result.stdout.strip()}")


def test_unknown_instruction_set() -> None:
    script = "from kvllm._extension import operator; operator('cpu_isa')()"
    environment = {**os.environ, "KVLLM_CPU_ISA": "sse9"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode != 0
    assert f"KVLLM_CPU_ISA is 'sse9': use {', '.join(LEVELS[:-1])} or {LEVELS[-1]}" in result.stderr
