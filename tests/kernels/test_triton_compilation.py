"""The Triton kernels without a GPU: their compilation to cubins, and the memory and instructions of these.

All compilations for one architecture are done in one process of their own, whose Triton has no interpreter.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch

from kvllm.attention.base import AttentionBatch, ScoreWindows
from kvllm.attention.layer import LayerAttention
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from tests.helpers.processes import ROOT, run_python

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")

# Bytes of shared memory that one program may have.
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}
# By whether every shape is compiled. Heads of 128 are also compiled with evicted KV pairs, and observed.
HEAD_DIMS = {
    False: {torch.bfloat16: (128,)},
    True: {torch.bfloat16: (64, 96, 128, 256), torch.float16: (128,), torch.float32: (128,)},
}
CASES = [(90, False), *(pytest.param(capability, True, marks=pytest.mark.long) for capability in SHARED_MEMORY)]


def compile_kernels(capability: int, every_shape: bool) -> None:
    """Call every launcher with kernels that are compiled, but not started; print what they are like, by name, and the
    names of those that were compiled again for another batch."""
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

    compiled: dict[str, list[dict[str, Any]]] = {}
    variants: dict[tuple[Any, ...], set[str]] = {}
    compile_and_start = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = compile_and_start(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"].startswith(b"\x7fELF")
        dtypes = tuple(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
        hashes = variants.setdefault((self.__name__, dtypes, *sorted(options.items())), set())
        if kernel.hash not in hashes:
            hashes.add(kernel.hash)
            formats_differ = len({torch.int8, torch.uint8, torch.float8_e5m2} & set(dtypes)) == 2
            described = describe(self.__name__, kernel) | {"formats_differ": formats_differ}
            compiled.setdefault(self.__name__, []).append(described)

    triton.runtime.driver.set_active(Device())
    JITFunction.run = compile_only
    for dtype, head_dims in HEAD_DIMS[every_shape].items():
        for head_dim in head_dims:
            launch_attention(dtype, head_dim)
            if dtype == torch.bfloat16 and head_dim in ((128, 256) if every_shape else (128,)):
                formats = KV_FORMATS if every_shape else ("fp8_e4m3", "int8", "int6_int4_hadamard")
                launch_quantized(head_dim, [name for name in formats if name != "fp8_e4m3" or capability >= 90])
        launch_elementwise(dtype, 3)
    for number in (1, 2, 3, 16, 33) if every_shape else (1, 3, 16):
        launch_batch(number)
        launch_rows(number)
    launch_sampling()
    again = {str(name) for (name, *_), hashes in variants.items() if len(hashes) > 1}
    print(json.dumps([compiled, sorted(again)]))


def describe(name: str, kernel: Any) -> dict[str, Any]:
    """The bytes of shared memory and of local memory of a compiled kernel, the numbers that it multiplies by tensor
    cores, whether the tensor memory accelerator reads tiles; of a prefill, whether whole groups of warps multiply."""
    tensor_cores = sorted(set(re.findall(r"mma\S*\.(bf16|f16)\b", kernel.asm["ptx"])))
    usage = inspect(kernel.asm["cubin"], "-res-usage")
    [(stack, local)] = re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", usage)
    # A disassembly takes a third of the time of a compilation, so it is left to those of which more is asked.
    instructions = inspect(kernel.asm["cubin"], "-sass") if name == "_attend_chunks" and tensor_cores else ""
    return {
        "shared": kernel.metadata.shared,
        "local": int(stack) + int(local),
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


@pytest.mark.parametrize(("capability", "every_shape"), CASES)
def test_every_kernel_compiles(tmp_path: Path, capability: int, every_shape: bool) -> None:
    code = f"compile_kernels({capability}, every_shape={every_shape})"
    compiled, again = run_python(code, __name__, TRITON_CACHE_DIR=str(tmp_path))
    sources = [path.read_text() for path in (ROOT / "kvllm" / "kernels").glob("*.py")]
    assert set(compiled) == {name for source in sources for name in re.findall(r"(\w+)\[\(", source)}
    assert again == []
    kernels = [(name, kernel) for name, of_name in compiled.items() for kernel in of_name]
    assert max(kernel["shared"] for _, kernel in kernels) <= SHARED_MEMORY[capability]
    if capability == 90:
        for name, kernel in kernels:
            # A decode keeps a pointer there throughout where keys and values have places of their own.
            allowed = 16 if name == "_attend_segments" and kernel["formats_differ"] else 0
            assert kernel["local"] <= allowed, name
        prefills = [kernel for name, kernel in kernels if name == "_attend_chunks" and kernel["tensor_cores"]]
        assert prefills
        assert all(kernel["warp_groups"] and not kernel["local_instructions"] for kernel in prefills)
        # Not in small blocks, in quantized ones, and where heads have evicted KV pairs.
        assert {kernel["boxes"] for kernel in prefills} == {False, True}
