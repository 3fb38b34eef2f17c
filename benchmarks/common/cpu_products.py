"""The matrix products of one step on a CPU: those of every layer, and the one of the logits, for every query token.

Weights are random, and all of a model, so a step reads from memory what a model's step does. Each call comes from
Python, as `LinearWeight.multiply`; the engine's loop over the layers is without that cost.
"""

from __future__ import annotations

import functools
import time

import msgspec
import torch

from benchmarks.common.limits import CPULimits
from benchmarks.common.shapes import SHAPES
from kvllm.models.layers import HEAD_BITS
from kvllm.models.quantize import group_size
from kvllm.models.weights import LinearWeight, Packing

WEIGHTS = {"bfloat16": None, "int8": 8, "int4": 4, "float32": None}
"""Bits of integers."""
SECONDS = 0.5
"""A measurement goes through the step again until this time has passed."""
HEADER = ["", "query\ntokens"]
FIGURES = ["ms", "GB/s", "of memory", "GFLOP/s", "of arithmetic", "of nearer limit"]


class Matrix(msgspec.Struct, frozen=True):
    """A weight `[out_features, in_features]`, and how many such a model has. bits: of integers, else None."""

    count: int
    out_features: int
    in_features: int
    dtype: torch.dtype
    bits: int | None

    @property
    def bytes(self) -> int:
        """Bytes of one weight, packed, with its scales."""
        size = self.out_features * self.in_features
        if self.bits is None:
            return size * self.dtype.itemsize
        group = group_size(self.in_features, self.bits)
        assert group is not None  # the built-in shapes can be held in any bits
        return size * self.bits // 8 + size // group * torch.float32.itemsize


class ProductCase(msgspec.Struct, frozen=True, tag=True):
    """rows: query tokens of the step."""

    shape: str
    weights: str
    rows: int

    @property
    def bytes(self) -> int:
        """Weights that a step reads."""
        return sum(matrix.count * matrix.bytes for matrix in matrices(self.shape, self.weights).values())

    @property
    def operations(self) -> int:
        """Multiplications and additions of a step."""
        numbers = (
            each.count * each.out_features * each.in_features for each in matrices(self.shape, self.weights).values()
        )
        return 2 * self.rows * sum(numbers)

    def labels(self) -> list[str]:
        return [f"{self.shape} {self.weights}, {self.bytes / 1e6:.0f} MB", str(self.rows)]

    def figures(self, seconds: float, limits: CPULimits) -> list[str]:
        """Memory does not limit weights that fit into the last-level cache."""
        read, computed = self.bytes / seconds, self.operations / seconds
        arithmetic = computed / limits.operations_per_s
        memory = None if limits.in_cache(self.bytes) else read / limits.read_bytes_per_s
        return [
            f"{seconds * 1e3:.2f}",
            f"{read / 1e9:.1f}",
            "in cache" if memory is None else f"{memory:.0%}",
            f"{computed / 1e9:.1f}",
            f"{arithmetic:.0%}",
            f"{max(arithmetic, memory or 0):.0%}",
        ]


def matrices(shape: str, weights: str) -> dict[str, Matrix]:
    """The weights of a model. The head has HEAD_BITS where the others are integers, as in the engine."""
    config, bits = SHAPES[shape], WEIGHTS[weights]
    hidden, intermediate, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    return {
        "qkv": Matrix(layers, queries + 2 * keys, hidden, dtype, bits),
        "o": Matrix(layers, hidden, queries, dtype, bits),
        "gate_up": Matrix(layers, 2 * intermediate, hidden, dtype, bits),
        "down": Matrix(layers, hidden, intermediate, dtype, bits),
        "head": Matrix(1, config["vocab_size"], hidden, dtype, HEAD_BITS if bits else None),
    }


@functools.lru_cache(maxsize=1)
def random_weights(shape: str, weights: str) -> list[tuple[str, LinearWeight]]:
    """The packed weights of a model with their names, in the order in which a step reads them."""
    kinds = matrices(shape, weights)
    packings = {bits: Packing(bits) for bits in {matrix.bits for matrix in kinds.values()}}
    layer = [name for name in kinds if name != "head"]
    result = []
    for name in [*layer * kinds["qkv"].count, "head"]:
        matrix = kinds[name]
        values = torch.empty(matrix.out_features, matrix.in_features, dtype=matrix.dtype).uniform_(-1, 1)
        weight = LinearWeight.pack(values, packings[matrix.bits])
        result.append((name, weight))
    return result


class Products:
    """All products of one step of a case."""

    def __init__(self, case: ProductCase) -> None:
        self.case = case
        self.matrices = matrices(case.shape, case.weights)
        self.weights = random_weights(case.shape, case.weights)
        self.inputs = {
            name: torch.rand(case.rows, each.in_features).to(each.dtype) for name, each in self.matrices.items()
        }

    def seconds(self) -> float:
        """Seconds of one step. The fastest call of each kind of product counts for all layers, because others disturb
        most calls of a busy machine."""
        fastest = dict.fromkeys(self.matrices, float("inf"))
        end = time.perf_counter() + SECONDS
        while True:
            for name, weight in self.weights:
                fastest[name] = min(fastest[name], self._call(name, weight))
            if time.perf_counter() > end:
                return sum(self.matrices[name].count * seconds for name, seconds in fastest.items())

    def _call(self, name: str, weight: LinearWeight) -> float:
        begin = time.perf_counter()
        weight.multiply(self.inputs[name])
        return time.perf_counter() - begin
