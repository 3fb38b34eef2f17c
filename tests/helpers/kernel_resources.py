"""What compiled Triton kernels take of a multiprocessor, on every architecture that the project supports.

`python -m tests.helpers.kernel_resources` compiles every shape for every architecture, some five minutes each, and
rewrites the rows of the installed version of Triton in tests/kernels/resources.csv; with 80 and 90 after it, those of
these alone.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from kvllm.kvcache.formats import KV_FORMATS
from tests.helpers import kernel_launches
from tests.helpers.processes import ROOT, run_python

MODULE = "tests.helpers.kernel_resources"
TABLE = ROOT / "tests/kernels/resources.csv"
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that one program may have, by compute capability."""
HEAD_DIMS = {torch.bfloat16: (64, 96, 128, 256, 512, 576), torch.float16: (128,), torch.float32: (128, 512, 576)}
LATENT_FORMATS = ("fp8_e4m3", "int8", "int4")
FIGURES = ("registers", "local", "shared")
"""Registers of a thread, its bytes of memory for what these do not hold, bytes of shared memory of a program."""
SHAPES = ("few", "every")
"""`launch_few`, or every size of head, dtype and format with it, and what numbers of sequences and tokens change."""


def compiled(capability: int, shapes: str, **environment: str) -> list[dict[str, Any]]:
    """What the kernels of some launchers are like, compiled for an architecture in a process of their own; `shapes`
    is one of SHAPES."""
    return run_python(f"compile_kernels({capability}, {shapes!r})", MODULE, **environment)


def compile_kernels(capability: int, shapes: str) -> None:
    """Print a description of each variant of a kernel that the launchers ask for."""
    with compiled_alone(capability) as found:
        kernel_launches.launch_few() if shapes == "few" else launch_every(capability)
    print(json.dumps(list(found.values())))


def launch_every(capability: int) -> None:
    """Heads of 128 are also launched with evicted KV pairs, and observed."""
    kernel_launches.launch_few()
    for dtype, head_dims in HEAD_DIMS.items():
        for head_dim in head_dims:
            kernel_launches.launch_attention(dtype, head_dim)
            if dtype == torch.bfloat16 and head_dim >= 128:
                names = [name for name in KV_FORMATS if name != "fp8_e4m3" or capability >= 89]
                formats = [name for name in names if head_dim != kernel_launches.LATENT or name in LATENT_FORMATS]
                kernel_launches.launch_quantized(head_dim, formats)
        kernel_launches.launch_elementwise(dtype, 3)
        if dtype != torch.float32:
            kernel_launches.launch_integers(dtype, 3, kernel_launches.INTEGERS)
    kernel_launches.launch_batch(3)
    kernel_launches.launch_rows(3)
    kernel_launches.launch_sampling()


@contextmanager
def compiled_alone(capability: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Kernels that are launched are compiled for an architecture and described by their hashes, and not started."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Device:
        """The driver that Triton asks before it compiles."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    found: dict[str, dict[str, Any]] = {}
    compile_and_start = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = compile_and_start(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in found:
            dtypes = [str(arg.dtype).removeprefix("torch.") for arg in args if isinstance(arg, torch.Tensor)]
            figures, shape = describe(self.__name__, kernel), options.get("SHAPE")
            found[kernel.hash] = {
                "kernel": self.__name__,
                "dtypes": dtypes,
                "head_dim": shape.head_dim if shape else options.get("HEAD_DIM", 0),
                "ragged": shape is not None and shape.ragged,
                **figures,
            }

    triton.runtime.driver.set_active(Device())
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = compile_and_start


def describe(name: str, kernel: Any) -> dict[str, Any]:
    """The figures of a compiled kernel, the numbers that it multiplies by tensor cores, whether the tensor memory
    accelerator reads tiles; of a prefill, whether whole groups of warps multiply."""
    tensor_cores = sorted(set(re.findall(r"mma\S*\.(bf16|f16)\b", kernel.asm["ptx"])))
    usage = inspect(kernel.asm["cubin"], "-res-usage")
    [(registers, stack, local)] = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    # A disassembly takes a third of the time of a compilation, so it is left to those of which more is asked.
    instructions = inspect(kernel.asm["cubin"], "-sass") if name == "_attend_chunks" and tensor_cores else ""
    return {
        "registers": int(registers),
        "local": int(stack) + int(local),
        "shared": kernel.metadata.shared,
        "tensor_cores": tensor_cores,
        "warp_groups": re.search(r"\bHGMMA\b", instructions) is not None,
        "local_instructions": len(re.findall(r"\b(?:LDL|STL)\b", instructions)),
        "boxes": "cp.async.bulk.tensor" in kernel.asm["ptx"],
    }


def inspect(cubin: bytes, option: str) -> str:
    """What cuobjdump says of a cubin: `-sass`, its instructions; `-res-usage`, the memory that a thread has for what
    its registers do not hold. Where that is 0 bytes there are no instructions LDL and STL."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([cuobjdump, option, file.name], capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


def largest(kernels: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """The largest figures of each kernel's variants, by its name."""
    names = sorted({each["kernel"] for each in kernels})
    return {
        name: {figure: max(each[figure] for each in kernels if each["kernel"] == name) for figure in FIGURES}
        for name in names
    }


def written(capability: int) -> dict[str, dict[str, int]]:
    """`largest`, of every shape, as the table has it of the installed version of Triton; empty if it has no rows."""
    key = (_triton_version(), str(capability))
    return {
        row["kernel"]: {figure: int(row[figure]) for figure in FIGURES}
        for row in _rows()
        if (row["triton"], row["capability"]) == key
    }


def write(capability: int) -> None:
    """Compile every shape, and rewrite an architecture's rows of the table."""
    key = (_triton_version(), str(capability))
    found = largest(compiled(capability, "every"))
    new = [{"triton": key[0], "capability": key[1], "kernel": name, **figures} for name, figures in found.items()]
    rows = [row for row in _rows() if (row["triton"], row["capability"]) != key] + new
    rows.sort(key=lambda row: (row["triton"], int(row["capability"]), row["kernel"]))
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, ("triton", "capability", "kernel", *FIGURES), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def _rows() -> list[dict[str, Any]]:
    if not TABLE.exists():
        return []
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def _triton_version() -> str:
    import triton

    return triton.__version__


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:] or map(str, SHARED_MEMORY)):
        write(capability)
