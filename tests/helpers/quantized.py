"""Quantized checkpoints, packed by the letter of their formats: number by number, in plain Python and NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import edit, make_checkpoint

Quantize = Callable[[torch.Tensor, torch.Generator], tuple[dict[str, torch.Tensor], torch.Tensor]]
"""A matrix `[out, in]` -> the tensors in its place by the ends of their names, and the matrix that they stand for."""
PROJECTIONS = (
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
QWEN3 = {"family": "qwen3", "head_dim": 16, "intermediate_size": 128, "num_attention_heads": 4}


def quantize_checkpoint(
    plain: Path, quantized: Path, settings: dict[str, Any], quantize: Quantize, model: dict[str, Any] = QWEN3
) -> None:
    """Write a random checkpoint with quantized matrices to `quantized`, and to `plain` one of the values they have.

    settings: `quantization_config`. model: arguments of `make_checkpoint`.
    """
    make_checkpoint(plain, **model)
    generator = torch.Generator().manual_seed(0)
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name in list(tensors):
        module = name.removesuffix(".weight")
        if name != module and module.endswith(PROJECTIONS):
            parts, tensors[name] = quantize(tensors[name], generator)
            stored |= {f"{module}.{part}": values for part, values in parts.items()}
        else:
            stored[name] = tensors[name]
    quantized.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file({name: values.contiguous() for name, values in stored.items()}, quantized / "model.safetensors")
    (quantized / "config.json").write_text((plain / "config.json").read_text())
    edit(quantized, quantization_config=json.loads(json.dumps(settings)))


def groups_of(
    matrix: torch.Tensor, group: int, bits: int, symmetric: bool, groups: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Integers `[in, out]`, scales and zero points `[groups, out]`, and the values `[in, out]` that they stand for.

    groups: of each row of the transpose.
    """
    weights = matrix.T.double().numpy()
    count, most = weights.shape[0] // group, 2**bits - 1
    scales, zeros = np.empty((2, count, weights.shape[1]))
    for g in range(count):
        part = weights[groups == g]
        low, high = part.min(0), part.max(0)
        if symmetric:
            scales[g], zeros[g] = 2 * np.abs(part).max(0) / most, 2 ** (bits - 1)
        else:
            scales[g] = (high - low) / most
            zeros[g] = np.clip(np.round(-low / scales[g]), 0, most)
    scales = scales.astype(np.float16)
    own_scales, own_zeros = scales.astype(np.float64)[groups], zeros[groups]
    integers = np.clip(np.round(weights / own_scales + own_zeros), 0, most)
    return integers.astype(np.int64), scales, zeros.astype(np.int64), (integers - own_zeros) * own_scales


def words(integers: np.ndarray, bits: int, places: list[int] | None = None) -> torch.Tensor:
    """Rows of integers `[n, m]` as int32 `[n, m * bits / 32]`: the one at place i of a word lies at bit `i * bits`.

    places: which of the neighbours lies at a place; default: the first at the first.
    """
    per_word = 32 // bits
    places = places or list(range(per_word))
    packed = np.zeros((len(integers), integers.shape[1] // per_word), np.uint32)
    for row, numbers in enumerate(integers):
        for word in range(packed.shape[1]):
            for place, neighbour in enumerate(places):
                packed[row, word] |= np.uint32(numbers[word * per_word + neighbour] << (place * bits))
    return torch.from_numpy(packed.view(np.int32))


def awq(group: int) -> Quantize:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def quantize(matrix: torch.Tensor, _: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        size = group if group > 0 else matrix.shape[1]
        groups = np.arange(matrix.shape[1]) // size
        integers, scales, zeros, values = groups_of(matrix, size, 4, False, groups)
        parts = {"qweight": words(integers, 4, order), "qzeros": words(zeros, 4, order)}
        return {**parts, "scales": torch.from_numpy(scales)}, torch.from_numpy(values.T.copy()).float()

    return quantize


def gptq(bits: int, group: int, symmetric: bool, ordered: bool, plain_zeros: bool = False) -> Quantize:
    orders: dict[int, np.ndarray] = {}  # projections of one input share it, as those of one width do here

    def quantize(matrix: torch.Tensor, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        width = matrix.shape[1]
        size = group if group > 0 else width
        groups = np.arange(width) // size
        if ordered:
            shuffled = orders.setdefault(width, torch.randperm(width, generator=generator).numpy())
            groups = groups[shuffled]
        integers, scales, zeros, values = groups_of(matrix, size, bits, symmetric, groups)
        stored_zeros = zeros if plain_zeros else (zeros - 1) % 2**bits
        parts = {
            "qweight": words(integers.T, bits).T,
            "qzeros": words(stored_zeros, bits),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return parts, torch.from_numpy(values.T.copy()).float()

    return quantize


def float8(block: tuple[int, int] | str, name: str, dtype: torch.dtype = torch.float32) -> Quantize:
    """block: rows and columns that share a scale, "channel" or "tensor"."""

    def quantize(matrix: torch.Tensor, _: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rows, columns = matrix.shape
        named = {"channel": (1, columns), "tensor": (rows, columns)}
        height, width = named[block] if isinstance(block, str) else block
        values, stored = matrix.clone(), torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
        scales = torch.empty(-(-rows // height), -(-columns // width), dtype=dtype)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
                scales[i, j] = matrix[part].abs().max() / 448
                stored[part] = (matrix[part] / scales[i, j].float()).to(torch.float8_e4m3fn)
                values[part] = stored[part].float() * scales[i, j].float()
        return {"weight": stored, name: scales.view(1) if block == "tensor" else scales}, values

    return quantize


def compressed_integers(bits: int, group: int, symmetric: bool, packed: bool, ordered: bool = False) -> Quantize:
    """group: -1 for a row. packed: as "pack-quantized" has them, else as "int-quantized"."""
    make = gptq(bits, group, symmetric, ordered)
    half = 2 ** (bits - 1)

    def quantize(matrix: torch.Tensor, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        parts, values = make(matrix, generator)
        groups = parts["g_idx"].numpy()
        count = groups.max() + 1
        integers, scales, zeros, _ = groups_of(matrix, matrix.shape[1] // count, bits, symmetric, groups)
        found = {"weight_scale": torch.from_numpy(scales.T.copy())}
        if packed:
            found |= {"weight_packed": words(integers.T, bits), "weight_shape": torch.tensor(matrix.shape)}
            stored_zeros = words(zeros, bits).T
        else:
            found["weight"] = torch.from_numpy((integers.T - half).astype(np.int8))
            stored_zeros = torch.from_numpy((zeros.T - half).astype(np.int8))
        if not symmetric:
            found["weight_zero_point"] = stored_zeros
        if ordered:
            found["weight_g_idx"] = parts["g_idx"]
        return found, values

    return quantize
