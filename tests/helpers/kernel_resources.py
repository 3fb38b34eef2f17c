"""What compiled Triton kernels take of a multiprocessor, for the architectures that the project supports.

`python -m tests.helpers.kernel_resources` compiles every shape for every architecture, and rewrites the rows of the
installed version of Triton in tests/kernels/resources.csv; 80 writes those of sm_80 alone.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from kvllm.kvcache.formats import KV_FORMATS
from tests.helpers import kernel_launches

# By whether every shape is compiled. Heads of 128 are also compiled with evicted KV pairs, and observed.
HEAD_DIMS = {
    False: {torch.bfloat16: (128,)},
    True: {torch.bfloat16: (64, 96, 128, 256), torch.float16: (128,), torch.float32: (128,)},
}


@contextmanager
def compiled_alone(capability: int) -> Iterator[list[dict[str, Any]]]:
    """Kernels that are launched are compiled for an architecture and described, in order, and not started."""
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
            tensors = [arg if isinstance(arg, torch.Tensor) else getattr(arg, "base", None) for arg in args]
            dtypes = " ".join(str(each.dtype).removeprefix("torch.") for each in tensors if each is not None)
            variant = {"kernel": self.__name__, "dtypes": dtypes, "options": str(sorted(options.items()))}
            found[kernel.hash] = variant | describe(self.__name__, kernel)

    triton.runtime.driver.set_active(Device())
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = compile_and_start


def compile_kernels(capability: int, every_shape: bool) -> None:
    """Print what the kernels of all launchers are like, compiled for an architecture."""
    from tests.helpers.kernel_launches import launch_attention, launch_quantized, launch_elementwise, launch_batch, launch_rows, launch_sampling
    with compiled_alone(capability) as found:
        for dtype, head_dims in HEAD_DIMS[every_shape].items():
            for head_dim in head_dims:
                launch_attention(dtype, head_dim)
                if dtype == torch.bfloat16 and head_dim in ((128, 256) if every_shape else (128,)):
                    formats = KV_FORMATS if every_shape else ("fp8_e4m3", "int8", "int6_int4_hadamard")
                    launch_quantized(head_dim, [name for name in formats if name != "fp8_e4m3" or capability >= 89])
            launch_elementwise(dtype, 3)
        for number in (1, 2, 3, 16, 33) if every_shape else (1, 3, 16):
            launch_batch(number)
            launch_rows(number)
        launch_sampling()
    print(json.dumps(list(found.values())))


def describe(name: str, kernel: Any) -> dict[str, Any]:
    tensor_cores = sorted(set(re.findall(r"mma\S*\.(bf16|f16)\b", kernel.asm["ptx"])))
    usage = inspect(kernel.asm["cubin"], "-res-usage")
    [(registers, stack, local)] = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    stack, local = int(stack), int(local)
    instructions = inspect(kernel.asm["cubin"], "-sass") if (name == "_attend_chunks" and tensor_cores) or stack or local else ""
    return {
        "registers": int(registers),
        "shared": kernel.metadata.shared,
        "stack": stack,
        "local": local,
        "ldl": len(re.findall(r"\b(?:LDL|STL)\b", instructions)),
        "tensor_cores": tensor_cores,
        "hgmma": len(re.findall(r"\bHGMMA\b", instructions)),
        "boxes": "cp.async.bulk.tensor" in kernel.asm["ptx"],
        "hash": kernel.hash,
    }


def inspect(cubin: bytes, option: str) -> str:
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([cuobjdump, option, file.name], capture_output=True, text=True, check=True)
    return result.stdout + result.stderr
