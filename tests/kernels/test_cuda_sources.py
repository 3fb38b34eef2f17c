"""The CUDA operators without a GPU: what their kernels do, run on the host, and that nvcc compiles them."""

from __future__ import annotations

import ctypes
import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kvllm._extension import has_cuda_operators, operator
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.compaction import pad
from kvllm.kvcache.ops.plain import TorchOperations
from kvllm.worker.features.attention_mass import AttentionMass
from tests.helpers.caches import literal_compaction, random_cache, random_kept
from tests.helpers.tensors import bits_of

ROOT = Path(__file__).parents[2]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
NVCC = SETUP["find_nvcc"]()

# Results


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of cuda_on_host.cpp."""
    if shutil.which("g++") is None:
        pytest.skip("needs the compiler g++, which is not installed")
    library = tmp_path_factory.mktemp("host") / "kernels.so"
    options = [
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
    ]
    subprocess.run(["g++", *options, str(ROOT / "tests/kernels/cuda_on_host.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def call(function: ctypes._CFuncPtr, *arguments: torch.Tensor | int) -> None:
    """Tensors are passed as addresses; numbers fit 64 bits, of which a function takes what it needs."""
    for argument in arguments:
        assert not isinstance(argument, torch.Tensor) or argument.is_contiguous()
    function(*(ctypes.c_int64(a.data_ptr() if isinstance(a, torch.Tensor) else a) for a in arguments))


def sizes(cache: torch.Tensor) -> tuple[int, int, int, int]:
    """KV heads, block size, vectors of a row, planes."""
    layers, _, _, heads, block_size, head_dim = cache.shape
    return heads, block_size, head_dim * cache.element_size() // 16, 2 * layers


def compact(
    host: ctypes.CDLL, cache: torch.Tensor, kept: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    heads, block_size, row_vectors, planes = sizes(cache)
    shape = (kept.shape[1], kept.shape[3], sources.shape[1], targets.shape[1])
    arguments = (cache.shape[2], heads, block_size, row_vectors, planes, kept, sources, targets, *shape, 32)
    call(host.compact, cache, *arguments)


@pytest.mark.parametrize("dtype, head_dim", [(torch.float32, 48), (torch.bfloat16, 128), (torch.bfloat16, 8)])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_compact(host: ctypes.CDLL, dtype: torch.dtype, head_dim: int, ragged: bool, in_place: bool) -> None:
    """Rows of 12, 16 and 1 vectors for 32 threads, and more of them than a tile has; the first three stay in place."""
    cache = random_cache(dtype, num_blocks=13, head_dim=head_dim).data
    sources = torch.tensor([[11, 3, 7, 1, 8, 2], [0, 6, 99, 99, 99, 99]])
    targets = sources[:, :5].contiguous() if in_place else torch.tensor([[10, 4, 9, 5, 12], [7, -1, -1, -1, -1]])
    others = random_kept(2, [93, 29], 3, [72, 13], ragged=ragged)
    first = torch.arange(3).expand(*others.shape[:3], 3)
    kept = torch.cat((first, torch.where(others < 0, -1, others + 3)), dim=-1)
    expected = literal_compaction(bits_of(cache), kept, sources, targets)
    compact(host, cache, kept, sources, targets)
    assert torch.equal(bits_of(cache), expected)


def test_compact_takes_sequences_in_order(host: ctypes.CDLL) -> None:
    """Two sequences share their blocks: one moves its survivors out, then the other compacts in place."""
    cache, reference = random_cache(torch.float32), random_cache(torch.float32)
    sources, targets = torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.tensor([[5], [0]])
    generator = torch.Generator().manual_seed(1)
    kept = torch.rand(2, 2, 3, 48, generator=generator).argsort(-1)[..., :16].sort(-1).values.contiguous()
    compact(host, cache.data, kept, sources, targets)
    TorchOperations(reference).compact(kept, sources, targets)
    assert torch.equal(bits_of(cache.data), bits_of(reference.data))


@pytest.mark.parametrize("dtype, head_dim", [(torch.float32, 48), (torch.bfloat16, 8)])
def test_copies_of_blocks(host: ctypes.CDLL, dtype: torch.dtype, head_dim: int) -> None:
    cache = random_cache(dtype, num_blocks=12, head_dim=head_dim).data
    sources, targets = torch.tensor([2, 2, 11]), torch.tensor([5, 0, 1])
    expected = bits_of(cache).clone()
    expected[:, :, targets] = expected[:, :, sources]
    call(host.copy_blocks, cache, cache.shape[2], *sizes(cache), sources, targets, 3, 32)
    assert torch.equal(bits_of(cache), expected)


def test_compact_mass(host: ctypes.CDLL) -> None:
    """Regions with nothing after them, with less and with more than they lose, at the start of a row and within it."""
    expected = AttentionMass(CacheShape(2, 3, 16, 16, torch.float32), 5, 300, torch.device("cpu"))
    expected.mass.copy_(torch.rand(expected.mass.shape, generator=torch.Generator().manual_seed(0)))
    mass = expected.mass.clone()
    regions = [(3, 0, 100, 100), (0, 32, 128, 130), (4, 7, 60, 299)]
    kept = [
        random_kept(2, [end - start], 3, [count], ragged=False)[:, 0]
        for (_, start, end, _), count in zip(regions, (40, 31, 53), strict=True)
    ]
    numbers = torch.tensor([(k.shape[-1], *region) for k, region in zip(kept, regions, strict=True)]).T.contiguous()
    padded = pad(kept)
    call(host.compact_mass, mass, mass.shape[1], 300, 3, 3, 2, padded, *numbers, padded.shape[-1], 32)
    expected.compact(regions, kept)
    assert torch.equal(mass, expected.mass)


# Compilation


@pytest.fixture(scope="module")
def architectures(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """Those that are compiled for: by default one, as each takes long."""
    return SETUP["CUDA_ARCHITECTURES"] if request.config.getoption("long") else (90,)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, architectures: tuple[int, ...]) -> Path:
    """The extension as setup.py builds it, but warnings are errors, of spilled registers as well."""
    if NVCC is None:
        pytest.skip("needs the CUDA compiler nvcc, which is not installed")
    output = tmp_path_factory.mktemp("cuda") / "_C_cuda.abi3.so"
    wanted = tuple(f"code=sm_{n}" for n in architectures)
    command = [
        word for word in SETUP["cuda_command"](NVCC, output) if not word.startswith("-gencode") or word.endswith(wanted)
    ]
    strict = ["-Werror=all-warnings", "-Xcompiler=-Werror", "-Xptxas=-warn-spills,-Werror"]
    result = subprocess.run([*command, *strict], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return output


def test_code_for_every_architecture(library: Path, architectures: tuple[int, ...]) -> None:
    """Nothing is spilled, and entries are read and written 16 bytes at a time."""
    if (triton := find_spec("triton")) is None:
        pytest.skip("needs cuobjdump, of the package triton, which is not installed")
    cuobjdump = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    dump = subprocess.run([cuobjdump, "--dump-sass", library], capture_output=True, text=True, check=True).stdout
    codes = {code.split("\n", 1)[0]: code for code in dump.split("arch = ") if "Function : " in code}
    assert set(codes) == {f"sm_{n}" for n in architectures}
    for code in codes.values():
        assert len(re.findall("Function : .*_kernel", code)) == 3
        assert not re.search(r"\b(LDL|STL)\b", code)
        for name in ("copy_blocks_kernel", "compact_kernel"):
            kernel = next(part for part in code.split("Function : ") if name in part.split("\n", 1)[0])
            assert len(re.findall(r"LDG\.E\S*\.128", kernel)) == len(re.findall(r"STG\.E\S*\.128", kernel)) == 4


def test_every_torch_can_load_it(library: Path) -> None:
    """A torch without CUDA as well; and it brings a kernel for every operator."""
    script = f"""
import torch
from kvllm._extension import load_extension
load_extension()
torch.ops.load_library({str(library)!r})
for name in ("copy_blocks", "compact", "compact_mass"):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("kvllm::" + name, "CUDA"), name
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


# On a device


@pytest.fixture
def operators() -> None:
    if not has_cuda_operators():
        pytest.skip("needs the CUDA operators, which were not built")


@pytest.mark.gpu
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dtype, head_dim", [(torch.bfloat16, 128), (torch.float32, 96)])
def test_operators_that_move(dtype: torch.dtype, head_dim: int) -> None:
    """Against plain torch: compaction and copies."""
    cache = random_cache(dtype, num_blocks=13, head_dim=head_dim).data
    on_device, sources, targets = cache.cuda(), torch.tensor([11, 3, 3]), torch.tensor([9, 10, 12])
    operator("copy_blocks")(on_device, sources.cuda(), targets.cuda())
    cache[:, :, targets] = cache[:, :, sources]
    assert torch.equal(bits_of(on_device.cpu()), bits_of(cache))
    region = torch.tensor([[5, 12, 7, 1], [0, 9, 99, 99]])
    kept = random_kept(2, [64, 32], 3, [40, 16], ragged=True)
    operator("compact")(on_device, kept.cuda(), region.cuda(), region[:, :3].contiguous().cuda())
    expected = literal_compaction(bits_of(cache), kept, region, region[:, :3])
    assert torch.equal(bits_of(on_device.cpu()), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("operators")
def test_operator_that_moves_mass() -> None:
    shape, regions = CacheShape(2, 3, 16, 16, torch.float32), [(3, 0, 100, 100), (0, 32, 128, 130), (4, 7, 60, 299)]
    kept = [random_kept(2, [end - start], 3, [30], ragged=False)[:, 0] for _, start, end, _ in regions]
    tables = [AttentionMass(shape, 5, 300, torch.device(device)) for device in ("cpu", "cuda")]
    tables[0].mass.copy_(torch.rand(tables[0].mass.shape))
    tables[1].mass.copy_(tables[0].mass)
    for table in tables:
        table.compact(regions, [offsets.to(table.mass.device) for offsets in kept])
    assert torch.equal(tables[0].mass, tables[1].mass.cpu())
