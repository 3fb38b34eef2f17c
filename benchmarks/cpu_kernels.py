"""The CPU operators against the limits of the machine: attention while decoding, and the matrix products of a step.

    python -m benchmarks.cpu_kernels
    python -m benchmarks.cpu_kernels --kernels products --weights int4 --rows 1 8
    python -m benchmarks.cpu_kernels --against old/kvllm/_C.abi3.so --shapes 50m --batches 8 --contexts 576

Two limits are measured, before all else and after it: how fast memory is read, and the arithmetic of matrix products
whose operands stay in the caches. The better of each counts, because work of others lowers both. Every build runs in a
process of its own, and the builds take turns at each measurement, because the speed of a shared machine changes within
seconds. The figures are medians over the rounds, of the fastest call in each.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
import torch

from benchmarks.common import command_line, machine, report
from benchmarks.common.child import ROOT
from benchmarks.common.limits import CPULimits, cpu_limits
from benchmarks.common.shapes import SHAPES
from kvllm import _extension
from kvllm.attention.cpu import window_arguments
from kvllm.config import require
from kvllm.errors import KvLLMError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.models.layers import HEAD_BITS
from kvllm.models.quantize import group_size
from kvllm.models.weights import LinearWeight, Packing

# Attention while decoding, layer after layer. The caches of all layers exceed the processor's; blocks are scattered.

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.bfloat16, "int4": torch.bfloat16}
"""That of queries, by the dtype of the cache."""
CACHE_BYTES = 256 << 20
CALLS = 30
"""Layers that one measurement goes through; the fastest counts, because others disturb most calls of a busy machine."""


class AttentionCase(msgspec.Struct, frozen=True, tag=True):
    shape: str
    dtype: str
    block_size: int
    batch: int
    context: int

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head_dim."""
        shape = SHAPES[self.shape]
        return shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]

    @property
    def bytes(self) -> int:
        """Keys and values that one call reads."""
        return self.batch * self.context * self.cache_shape(1).bytes_per_block // self.block_size

    def cache_shape(self, layers: int) -> CacheShape:
        _, kv_heads, head_dim = self.heads
        kv_format = KV_FORMATS.get(self.dtype)
        return CacheShape(layers, kv_heads, head_dim, self.block_size, DTYPES[self.dtype], kv_format=kv_format)

    def labels(self) -> list[str]:
        return [f"{self.shape} {self.dtype}, blocks of {self.block_size}", str(self.batch), str(self.context)]

    def figures(self, seconds: float, limits: CPULimits) -> list[str]:
        rate = self.bytes / seconds
        return [f"{seconds * 1e6:.0f}", f"{rate / 1e9:.1f}", f"{rate / limits.read_bytes_per_s:.0%}"]


NO_WINDOWS = window_arguments(None)


class Decode:
    """One decode step of a case, layer after layer."""

    def __init__(self, case: AttentionCase) -> None:
        self.case = case
        query_heads, _, head_dim = case.heads
        dtype = DTYPES[case.dtype]
        width = -(-case.context // case.block_size)
        blocks = case.batch * width
        self.layers = max(2, CACHE_BYTES // (blocks * case.cache_shape(1).bytes_per_block))
        self.cache = PagedKVCache(case.cache_shape(self.layers), blocks)
        self._fill()
        generator = torch.Generator().manual_seed(0)
        self.queries = torch.rand(case.batch, query_heads, head_dim, generator=generator).to(dtype)
        self.query_start_loc = torch.arange(case.batch + 1, dtype=torch.int32)
        self.last_kv_index = torch.full((case.batch,), case.context - 1, dtype=torch.int32)
        self.block_tables = torch.randperm(blocks, generator=generator).to(torch.int32).view(case.batch, width)
        self.scale = head_dim**-0.5
        self.attention = torch.ops.kvllm.paged_attention.default
        self.next_layer = 0

    def _fill(self) -> None:
        """Numbers between -1 and 1, in every format."""
        vectors = torch.rand(self.cache.num_blocks, 1, 1, self.case.heads[2]) * 2 - 1
        for plane in self.cache.planes:
            for part, rows in zip(plane.parts, plane.encode(vectors), strict=True):
                part.copy_(rows)

    def seconds(self) -> float:
        """Seconds of one layer."""
        return min(self._call() for _ in range(CALLS))

    def _call(self) -> float:
        layer, self.next_layer = self.next_layer, (self.next_layer + 1) % self.layers
        keys, values = self.cache.keys(layer), self.cache.values(layer)
        tables = self.query_start_loc, self.last_kv_index, self.block_tables
        begin = time.perf_counter()
        self.attention(self.queries, keys, values, *tables, *[None] * 4, *NO_WINDOWS, self.scale)
        return time.perf_counter() - begin


# The matrix products of one step: of every layer, and of the logits for every query token. Weights are random, and
# all of a model, so a step reads from memory what a model's step does. Each call comes from Python, as
# `LinearWeight.multiply`; the engine's loop over the layers is without that cost.

WEIGHTS = {"bfloat16": None, "int8": 8, "int4": 4, "float32": None}
"""Bits of integers."""
SECONDS = 0.5
"""A measurement goes through the step again until this time has passed."""


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


# Builds and the report

Case = AttentionCase | ProductCase
HEADERS = {"attention": ["", "sequences", "context"], "products": ["", "query\ntokens"]}
FIGURES = {
    "attention": ["us", "GB/s", "of memory"],
    "products": ["ms", "GB/s", "of memory", "GFLOP/s", "of arithmetic", "of nearer limit"],
}


class Build:
    """A process that has loaded one build of the operators."""

    def __init__(self, library: Path, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.cpu_kernels", "--serve", str(library), "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)

    def seconds(self, case: Case) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(case) + b"\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise KvLLMError("a process that measures has failed, see above")
        return float(answer)

    def close(self) -> None:
        self.process.communicate()


def serve(library: Path) -> None:
    """Measure each case of stdin once, one a line."""
    _extension._libraries = lambda name: [library]  # a process that loads a second build crashes
    _extension.load_extension()
    kernel: Decode | Products | None = None
    for line in sys.stdin.buffer:
        case = msgspec.json.decode(line, type=Case)
        if kernel is None or kernel.case != case:
            kernel = Decode(case) if isinstance(case, AttentionCase) else Products(case)
            kernel.seconds()
        print(kernel.seconds(), flush=True)


def measure(builds: Sequence[Build], cases: Sequence[Case], rounds: int) -> list[list[list[float]]]:
    """Seconds of each case, round and build."""
    results = []
    for case in cases:
        times = [[build.seconds(case) for build in builds] for _ in range(rounds)]
        print(
            *case.labels(), *(f"{median(column) * 1e3:.3f} ms" for column in zip(*times, strict=True)), file=sys.stderr
        )
        results.append(times)
    return results


def make_row(case: Case, times: list[list[float]], limits: CPULimits) -> list[str]:
    """A row of the report."""
    row = case.labels()
    for column in zip(*times, strict=True):
        row += case.figures(median(column), limits)
    if len(times[0]) == 2:
        row.append(f"{median(other / this for this, other in times):.2f}")
    return row


def make_header(kernels: str, builds: int) -> list[str]:
    """Titles of the columns; with two builds, their names stand above their figures."""
    header, figures = HEADERS[kernels], FIGURES[kernels]
    if builds == 1:
        return [*header, *figures]
    both = [f"{name}\n{title}" for name in ("this build", "the other") for title in figures]
    return [*header, *both, "times\nfaster"]


def make_cases(kernels: str, args: argparse.Namespace) -> list[Case]:
    if kernels == "products":
        return [ProductCase(*values) for values in itertools.product(args.shapes, args.weights, args.rows)]
    axes = args.shapes, args.dtypes, args.block_sizes, args.batches, args.contexts
    return [AttentionCase(*values) for values in itertools.product(*axes)]


def make_parser() -> argparse.ArgumentParser:
    parser = command_line.make_parser("benchmarks.cpu_kernels", __doc__)
    add = parser.add_argument
    add("--kernels", nargs="+", choices=tuple(HEADERS), default=list(HEADERS))
    add("--against", type=Path, metavar="LIBRARY", help="another build of the operators, to compare with")
    add("--shapes", nargs="+", choices=("50m", "0.6b"), default=["50m", "0.6b"])
    add("--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    add("--block-sizes", nargs="+", type=int, default=[16, 256])
    add("--batches", nargs="+", type=int, default=[1, 8])
    add("--contexts", nargs="+", type=int, default=[128, 512, 1024, 4096])
    add("--weights", nargs="+", choices=tuple(WEIGHTS), default=["bfloat16", "int8", "int4"])
    add("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32, 512], help="query tokens of a step of products")
    add("--rounds", type=int, default=7, help="measurements of each case and build (default 7)")
    add("--threads", type=int, default=torch.get_num_threads(), help="default: all that torch takes")
    add("--serve", type=Path, metavar="LIBRARY", help="used by the script itself")
    return parser


def main(arguments: Sequence[str]) -> None:
    args = make_parser().parse_args(arguments)
    torch.set_num_threads(args.threads)
    if args.serve is not None:
        serve(args.serve)
        return
    require(args.rounds > 0, "--rounds", args.rounds, "at least 1")
    libraries = [min((ROOT / "kvllm").glob("_C.*so")), *([args.against.resolve()] if args.against else [])]
    before = cpu_limits()
    builds = [Build(library, args.threads) for library in libraries]
    cases = {name: make_cases(name, args) for name in args.kernels}
    times = {name: measure(builds, cases[name], args.rounds) for name in args.kernels}
    for build in builds:
        build.close()
    limits = before.better(cpu_limits())
    print(machine.describe(machine.machine()))
    print(
        f"{args.threads} threads read {limits.read_bytes_per_s / 1e9:.1f} GB/s from memory, and compute "
        f"{limits.operations_per_s / 1e9:.0f} GFLOP/s"
    )
    for name in args.kernels:
        rows = [make_row(case, each, limits) for case, each in zip(cases[name], times[name], strict=True)]
        print(f"\n{name.capitalize()}\n\n" + report.table(make_header(name, len(builds)), rows))


if __name__ == "__main__":
    command_line.run_script(main)
