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


def launch_attention(dtype: torch.dtype, head_dim: int) -> None:
    """A batch of a decode and a chunk, with holes and without, and everything else that touches a cache."""
    from kvllm.attention.triton import TritonBackend
    from kvllm.kernels.scores import window_scores
    from kvllm.kvcache.ops.gpu import GpuOperations

    def ints(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    cache = PagedKVCache(CacheShape(1, 8, head_dim, 256, dtype, scored=True), 4)
    backend = TritonBackend(cache, 32, head_dim**-0.5)
    queries = torch.zeros(33, 32, head_dim, dtype=dtype)
    with_holes: dict[str, Any] = {"packed_len": ints(2), "head_lengths": ints(1, 2, 8)}
    observed: dict[str, Any] = {"table_slots": ints(2), "mass": torch.zeros(1, 2, 8, 4096)}
    windows: dict[str, Any] = {"window_start": ints(2), "windows": ScoreWindows(768, 768, 736, squared=True)}
    for options in ({}, with_holes, observed, windows) if head_dim == 128 else ({},):
        batch = AttentionBatch(torch.tensor([0, 1, 33], dtype=torch.int32), ints(33), ints(2, 8), **options)
        backend.run(0, queries, backend.plan(batch))
        if head_dim == 128 and dtype == torch.bfloat16 and options is not with_holes:
            launch_options(cache, queries, batch, None if options else 1024)
    alone = AttentionBatch(torch.tensor([0, 33], dtype=torch.int32), ints(33), ints(1, 1))
    backend.run(0, queries, backend.plan(alone))
    operations = GpuOperations(cache, compiled=False)
    operations.store(0, queries[:, :8], queries[:, 8:16], ints(33).long())
    operations.copy_blocks(ints(1).long(), ints(1).long())
    operations.compact(ints(1, 2, 8, 256).long(), ints(2, 3).long(), ints(2, 1).long())
    window = queries[None].transpose(1, 2), torch.zeros(1, 8, 768, head_dim, dtype=dtype), 736, 0.1
    window_scores(*window)
    window_scores(*window, ints(33).long(), squared=True)
    window_scores(*window, ints(33).long(), soft_cap=50.0, sinks=torch.zeros(32))
    launch_paged_keys(cache, window[0], ints(1, 3))


def launch_paged_keys(cache: PagedKVCache, queries: torch.Tensor, tables: torch.Tensor) -> None:
    """What reads the keys of windows from a cache."""
    from kvllm.kernels.codes import as_kernels_read
    from kvllm.kernels.keydiff import key_differences
    from kvllm.kernels.scores import window_scores

    offsets, size = torch.zeros(queries.shape[2], dtype=torch.int64), tables.shape[1] * cache.shape.block_size
    blocks = as_kernels_read([cache.keys(0)])
    window_scores(queries, blocks[0], size - 32, 0.1, offsets, tables=tables, squared=True)
    key_differences(blocks, tables, size, cache.shape.head_dim, cache.shape.dtype)


def launch_quantized(head_dim: int, names: list[str]) -> None:
    """What reads and writes codes: a decode, a chunk whose attention is observed, and moves of both parts of a pair."""
    from kvllm.attention.triton import TritonBackend
    from kvllm.kvcache.ops.gpu import GpuOperations

    queries = torch.zeros(33, 32, head_dim, dtype=torch.bfloat16)
    starts, index = torch.tensor([0, 1, 33], dtype=torch.int32), torch.zeros(33, dtype=torch.int32)
    slots, mass = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2, 8, 4096)
    batch = AttentionBatch(starts, index, torch.zeros(2, 8, dtype=torch.int32), table_slots=slots, mass=mass)
    kept, blocks = torch.zeros(1, 1, 8, 256, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    for name in names:
        cache = PagedKVCache(CacheShape(1, 8, head_dim, 256, torch.bfloat16, kv_format=KV_FORMATS[name]), 4)
        backend = TritonBackend(cache, 32, 0.1)
        backend.run(0, queries, backend.plan(batch))
        operations = GpuOperations(cache, compiled=False)
        operations.store(0, queries[:, :8], queries[:, 8:16], torch.zeros(33, dtype=torch.int64))
        operations.copy_blocks(blocks[0], blocks[0])
        operations.compact(kept, blocks, blocks)
        launch_paged_keys(cache, queries[None].transpose(1, 2), blocks.int())


def launch_options(cache: PagedKVCache, queries: torch.Tensor, batch: AttentionBatch, window: int | None) -> None:
    """A layer with a soft cap and learned scores."""
    from kvllm.attention.triton import TritonBackend

    backend = TritonBackend(cache, 32, 0.1, (LayerAttention(window=window, soft_cap=50.0, sinks=True),))
    backend.run(0, queries, backend.plan(batch), torch.zeros(32))


def launch_batch(num_sequences: int) -> None:
    """Decodes alone and beside a chunk, with holes and without, in the second layer of a cache with one KV head: the
    lengths of its heads begin at any number. Then what else depends on the number of sequences or tokens."""
    from kvllm.attention.triton import TritonBackend
    from kvllm.kvcache.ops.gpu import GpuOperations

    def ints(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    holes: dict[str, Any] = {"packed_len": ints(num_sequences), "head_lengths": ints(2, num_sequences, 1)}
    observed: dict[str, Any] = {"table_slots": ints(num_sequences), "mass": torch.zeros(2, num_sequences, 1, 4096)}
    windows: dict[str, Any] = {
        "window_start": ints(num_sequences),
        "windows": ScoreWindows(768, 768, 736, squared=True),
    }
    quantized = ((KV_FORMATS["int8"], ({}, holes)), (KV_FORMATS["int6_int4_hadamard"], ({},)))
    for kv_format, every in ((None, ({}, holes, observed, windows)), *quantized):
        shape = CacheShape(2, 1, 128, 16, torch.bfloat16, kv_format=kv_format, scored=kv_format is None)
        cache = PagedKVCache(shape, 4)
        backend, operations = TritonBackend(cache, 4, 0.1), GpuOperations(cache, compiled=False)
        for num_tokens in (num_sequences, num_sequences + 5):
            queries = torch.zeros(num_tokens, 4, 128, dtype=torch.bfloat16)
            for options in every:
                tables = ints(num_sequences, num_sequences)
                batch = AttentionBatch(ints(num_sequences + 1), ints(num_tokens), tables, **options)
                backend.run(1, queries, backend.plan(batch))
            operations.store(1, queries[:, :1], queries[:, 1:2], ints(num_tokens, dtype=torch.int64))
        blocks = ints(num_sequences, 1 + num_sequences, dtype=torch.int64)
        operations.copy_blocks(blocks[:, 0].contiguous(), blocks[:, 0].contiguous())
        operations.compact(ints(2, num_sequences, 1, 3 + num_sequences, dtype=torch.int64), blocks, blocks)


def launch_rows(number: int) -> None:
    """What depends on how many tokens, rows of logits or windows there are, of a model of 16 bits."""
    from kvllm.kernels.scores import window_scores

    launch_elementwise(torch.bfloat16, number)
    launch_draws(number, torch.bfloat16, top_k=True, top_p=True)
    queries = torch.zeros(number, 16 + number, 32, 128, dtype=torch.bfloat16).transpose(1, 2)
    window_scores(queries, torch.zeros(number, 8, 16 + number, 128, dtype=torch.bfloat16), number, 0.1)
    cache = PagedKVCache(CacheShape(1, 8, 128, 256, torch.bfloat16), 4)
    launch_paged_keys(cache, queries, torch.zeros(number, number, dtype=torch.int32))


def launch_sampling() -> None:
    """Logits of a model of 16 bits; those that were changed, and are of 32, with the filter that most requests have."""
    for top_k, top_p in itertools.product((False, True), repeat=2):
        launch_draws(3, torch.bfloat16, top_k=top_k, top_p=top_p)
    launch_draws(3, torch.float32, top_k=False, top_p=True)


def launch_draws(rows: int, dtype: torch.dtype, **filtered: bool) -> None:
    from kvllm.kernels.sampling import Maxima, draw
    from kvllm.kernels.token_masks import forbid_others

    logits, filters = torch.zeros(rows, 128256, dtype=dtype), torch.zeros(rows, 5, dtype=torch.float64)
    forbid_others(logits, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, 4008, dtype=torch.int32))
    maxima = Maxima.of(logits)
    maxima.most_likely()
    draw(logits, maxima, torch.zeros(rows, dtype=torch.int64), filters, **filtered)


def launch_elementwise(dtype: torch.dtype, rows: int) -> None:
    """Of a layer, between its products; and the products with its experts, of few rows each and of many."""
    from kvllm.kernels import elementwise
    from kvllm.kernels.grouped_linear import grouped_linear

    x, weight = torch.zeros(rows, 6144, dtype=dtype), torch.zeros(6144, dtype=dtype)
    elementwise.rms_norm(x, weight, 1e-6)
    elementwise.add_rms_norm(x, x, weight, 1e-6)
    elementwise.silu_mul(x)
    experts, bias, ends = (torch.zeros(8, *size, dtype=dtype) for size in ((96, 6144), (96,), ()))
    for of_experts in (x, torch.zeros(300 + rows, 6144, dtype=dtype)):
        grouped_linear(of_experts, experts, bias, ends.long())
        grouped_linear(of_experts, experts, None, ends.long())
    positions, table = torch.zeros(rows, dtype=torch.int64), torch.zeros(9, 128)
    elementwise.rotary(x, positions, table, 32, 8, 128)
    elementwise.rotary(x, positions, table, 32, 8, 128, weight[:128], weight[:128])


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
