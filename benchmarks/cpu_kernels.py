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
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
import torch

from benchmarks.common import command_line, cpu_attention, cpu_products, machine, report
from benchmarks.common.child import ROOT
from benchmarks.common.cpu_attention import AttentionCase, Decode
from benchmarks.common.cpu_products import ProductCase, Products
from benchmarks.common.limits import CPULimits, cpu_limits
from kvllm import _extension
from kvllm.config import require
from kvllm.errors import KvLLMError

Case = AttentionCase | ProductCase
KERNELS = {"attention": cpu_attention, "products": cpu_products}


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
    header, figures = KERNELS[kernels].HEADER, KERNELS[kernels].FIGURES
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
    add("--kernels", nargs="+", choices=tuple(KERNELS), default=list(KERNELS))
    add("--against", type=Path, metavar="LIBRARY", help="another build of the operators, to compare with")
    add("--shapes", nargs="+", choices=("50m", "0.6b"), default=["50m", "0.6b"])
    add("--dtypes", nargs="+", choices=tuple(cpu_attention.DTYPES), default=list(cpu_attention.DTYPES))
    add("--block-sizes", nargs="+", type=int, default=[16, 256])
    add("--batches", nargs="+", type=int, default=[1, 8])
    add("--contexts", nargs="+", type=int, default=[128, 512, 1024, 4096])
    add("--weights", nargs="+", choices=tuple(cpu_products.WEIGHTS), default=["bfloat16", "int8", "int4"])
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
