"""Attention of the CPU operators while decoding: bytes of keys and values per second, against what the memory gives.

    python -m benchmarks.cpu_kernels
    python -m benchmarks.cpu_kernels --against old/kvllm/_C.abi3.so --shapes 50m --batches 8 --contexts 576

Every build runs in a process of its own, and the builds take turns at each measurement, because the speed of a shared
machine changes within seconds. The caches of all layers together exceed the processor's, and their blocks are
scattered. The figures are medians over the rounds, of the fastest call in each.
"""

from __future__ import annotations

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
from kvllm.config import require
from kvllm.errors import KvLLMError
from kvllm.kvcache.cache import CacheShape, PagedKVCache

SHAPES = {"50m": (8, 2, 64), "0.6b": (16, 8, 128)}
"""Query heads, KV heads, head_dim."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CACHE_BYTES = 256 << 20
CALLS = 30
"""Layers that one measurement goes through; the fastest counts, because others disturb most calls of a busy machine."""


class Case(msgspec.Struct, frozen=True):
    shape: str
    dtype: str
    block_size: int
    batch: int
    context: int

    @property
    def bytes(self) -> int:
        """Keys and values that one call reads."""
        _, kv_heads, head_dim = SHAPES[self.shape]
        return 2 * self.batch * self.context * kv_heads * head_dim * DTYPES[self.dtype].itemsize


class Decode:
    """One decode step of a case, layer after layer."""

    def __init__(self, case: Case) -> None:
        self.case = case
        query_heads, kv_heads, head_dim = SHAPES[case.shape]
        dtype = DTYPES[case.dtype]
        width = -(-case.context // case.block_size)
        blocks = case.batch * width
        layer = CacheShape(1, kv_heads, head_dim, case.block_size, dtype)
        self.layers = max(2, CACHE_BYTES // (blocks * layer.bytes_per_block))
        self.cache = PagedKVCache(CacheShape(self.layers, kv_heads, head_dim, case.block_size, dtype), blocks)
        self.cache.data.uniform_(-1, 1)
        generator = torch.Generator().manual_seed(0)
        self.queries = torch.rand(case.batch, query_heads, head_dim, generator=generator).to(dtype)
        self.query_start_loc = torch.arange(case.batch + 1, dtype=torch.int32)
        self.last_kv_index = torch.full((case.batch,), case.context - 1, dtype=torch.int32)
        self.block_tables = torch.randperm(blocks, generator=generator).to(torch.int32).view(case.batch, width)
        self.scale = head_dim**-0.5
        self.attention = torch.ops.kvllm.paged_attention.default
        self.next_layer = 0

    def seconds(self) -> float:
        """Of one layer."""
        return min(self._call() for _ in range(CALLS))

    def _call(self) -> float:
        layer, self.next_layer = self.next_layer, (self.next_layer + 1) % self.layers
        keys, values = self.cache.keys(layer), self.cache.values(layer)
        tables = self.query_start_loc, self.last_kv_index, self.block_tables
        begin = time.perf_counter()
        self.attention(self.queries, keys, values, *tables, None, None, self.scale)
        return time.perf_counter() - begin


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
    torch.ops.load_library(library)
    decode: Decode | None = None
    for line in sys.stdin.buffer:
        case = msgspec.json.decode(line, type=Case)
        if decode is None or decode.case != case:
            decode = Decode(case)
            decode.seconds()
        print(decode.seconds(), flush=True)


def measure(builds: Sequence[Build], cases: Sequence[Case], rounds: int, bandwidth: float) -> list[list[str]]:
    """Rows of the report."""
    rows = []
    for case in cases:
        times = [[build.seconds(case) for build in builds] for _ in range(rounds)]
        medians = [median(column) for column in zip(*times, strict=True)]
        rates = [case.bytes / seconds for seconds in medians]
        row = [f"{case.shape} {case.dtype}, blocks of {case.block_size}", str(case.batch), str(case.context)]
        for seconds, rate in zip(medians, rates, strict=True):
            row += [f"{seconds * 1e6:.0f}", f"{rate / 1e9:.1f}", f"{rate / bandwidth:.0%}"]
        if len(builds) == 2:
            row.append(f"{median(other / this for this, other in times):.2f}")
        rows.append(row)
        print(*row, sep="  ", file=sys.stderr)
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.cpu_kernels", __doc__)
    add = parser.add_argument
    add("--against", type=Path, metavar="LIBRARY", help="another build of the operators, to compare with")
    add("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    add("--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    add("--block-sizes", nargs="+", type=int, default=[16, 256])
    add("--batches", nargs="+", type=int, default=[1, 8])
    add("--contexts", nargs="+", type=int, default=[128, 512, 1024, 4096])
    add("--rounds", type=int, default=7, help="measurements of each case and build (default 7)")
    add("--threads", type=int, default=torch.get_num_threads(), help="default: all that torch takes")
    add("--serve", type=Path, metavar="LIBRARY", help="used by the script itself")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if args.serve is not None:
        serve(args.serve)
        return
    require(args.rounds > 0, "--rounds", args.rounds, "at least 1")
    libraries = [min((ROOT / "kvllm").glob("_C.*so")), *([args.against.resolve()] if args.against else [])]
    bandwidth = machine.read_bandwidth()
    builds = [Build(library, args.threads) for library in libraries]
    axes = itertools.product(args.shapes, args.dtypes, args.block_sizes, args.batches, args.contexts)
    rows = measure(builds, [Case(*values) for values in axes], args.rounds, bandwidth)
    for build in builds:
        build.close()
    header = ["", "sequences", "context"]
    for name in ["this build", "the other"][: len(builds)]:
        header += [f"{name}\nus", "\nGB/s", "\nof memory"]
    print(machine.describe(machine.machine()))
    print(f"{args.threads} threads read {bandwidth / 1e9:.1f} GB/s from memory")
    print(report.table([*header, *(["times\nfaster"] if len(builds) == 2 else [])], rows))


if __name__ == "__main__":
    command_line.run_script(main)
