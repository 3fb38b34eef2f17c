"""Weights of 8 and 4 bits: the integers against a literal reference, products against the dequantized matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvllm.attention.cpu import CpuBackend
from kvllm.models.loader import load_model
from kvllm.models.weights import LinearWeight, Packing
from kvllm.parallel import SingleRank
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.families import FAMILIES
from tests.helpers.paged_model import CPU, PagedModel, load, tokens
from tests.helpers.product_checks import CHECKS, dequantized, pack


def all_rows(weight: LinearWeight) -> torch.Tensor:
    return weight.rows(torch.arange(weight.out_features))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_dequantized_matrix(dtype: torch.dtype, bits: int) -> None:
    for rows, columns in ((72, 40), (70, 256), (7, 96), (1030, 128)):
        matrix = torch.randn(rows, columns).to(dtype)
        matrix[3] = 0
        expected = dequantized(matrix, bits).to(dtype)
        torch.testing.assert_close(
            all_rows(pack(matrix, bits)), expected, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=0
        )


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(check: Callable[[torch.dtype, int], None], dtype: torch.dtype, bits: int) -> None:
    torch.manual_seed(0)
    check(dtype, bits)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_rows_are_written_in_any_parts(bits: int | None) -> None:
    """Parts begin and end within a tile, as the queries, keys and values of small heads do."""
    matrix = torch.randn(101, 64, dtype=torch.bfloat16)
    weight = LinearWeight(101, 64, torch.bfloat16, CPU)
    weight.allocate(Packing(bits))
    for first, last in ((90, 101), (0, 5), (5, 7), (7, 64), (64, 90)):
        weight.write(first, matrix[first:last])
    expected = LinearWeight.pack(matrix, Packing(bits))
    assert torch.equal(all_rows(weight), all_rows(expected))
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(weight.multiply(x), expected.multiply(x)) and weight.multiply(x).abs().min() > 0


@pytest.mark.parametrize(("bits", "memory"), [(8, 0.5), (4, 0.25)])
def test_memory_and_error(bits: int, memory: float) -> None:
    """Against bfloat16, scales included; the error of a weight is at most half a step, or a whole one at -8's side."""
    matrix = torch.randn(256, 1024)
    weight = pack(matrix.to(torch.bfloat16), bits)
    assert weight.packed is not None and weight.scales is not None and weight.tensor.numel() == 0
    num_bytes = weight.packed.nbytes + weight.scales.nbytes
    assert memory <= num_bytes / (2 * matrix.numel()) < memory + 0.02
    error = (all_rows(weight).float() - matrix).norm() / matrix.norm()
    assert error < (0.01 if bits == 8 else 0.12)


def test_a_matrix_that_does_not_fill_words_stays_as_it_is() -> None:
    matrix = torch.randn(16, 6)
    weight = pack(matrix, 4)
    assert weight.scales is None and torch.equal(all_rows(weight), matrix)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "smollm3", "olmo3", "granite4", "glm4", "lfm2-moe"])
def test_a_model_of_few_bits(tmp_path: Path, family: str, dtype: torch.dtype, bits: int) -> None:
    """Equal bits compiled and looped, and near the model of full weights."""
    make_checkpoint(tmp_path, **FAMILIES[family] | {"num_hidden_layers": 3})
    full, config = load(tmp_path, dtype)
    few = load_model(tmp_path, config, SingleRank(), dtype, CPU, config.max_position_embeddings, bits)
    assert few.layers[0].mlp.down.weight.scales is not None and few.lm_head.weight.packed.dtype == torch.int8
    steps = [{0: tokens(20), 1: tokens(7, 2)}, {0: [5], 1: [9]}]
    models = [PagedModel(model, config, dtype, CpuBackend) for model in (full, few, few)]
    expected, compiled = ([model.logits(step) for step in steps] for model in models[:2])
    few._compiled = None
    for reference, found, step in zip(expected, compiled, steps, strict=True):
        assert torch.equal(found, models[2].logits(step))
        assert torch.nn.functional.cosine_similarity(reference, found).median() > (0.99 if bits == 8 else 0.8)
