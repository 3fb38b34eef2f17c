"""Builds the compiled operators; everything else about the package is in pyproject.toml.

The extensions use only PyTorch's stable ABI: built once, they load in every torch from 2.11 and every Python from 3.11.
That of the CUDA operators is built wherever there is an nvcc, whatever torch is installed, and loaded only by a torch
with CUDA.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.errors import CompileError
from torch.utils.cpp_extension import TORCH_LIB_PATH, BuildExtension, CppExtension, include_paths

ROOT = Path(__file__).parent
CUDA_EXTENSION = "kvllm._C_cuda"
# Compute capabilities; the code of one runs on all later ones of the same generation.
CUDA_ARCHITECTURES = (80, 90, 100, 120)

TORCH_2_11 = "-DTORCH_TARGET_VERSION=0x020b000000000000"
COMPILE_ARGUMENTS = [
    "-std=c++20",
    TORCH_2_11,
    *(f"-isystem{path}" for path in include_paths()),  # no warnings about torch's headers
    "-O3",
    "-g0",
    "-Wall",
    "-Wextra",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    f"-fmacro-prefix-map={ROOT.resolve()}/=",
]
LINK_ARGUMENTS = ["-s"]
SANITIZERS = os.environ.get("KVLLM_SANITIZERS")  # such as "address,undefined": see `make test-sanitizers`
if SANITIZERS:
    LINK_ARGUMENTS = [f"-fsanitize={SANITIZERS}"]
    COMPILE_ARGUMENTS += [*LINK_ARGUMENTS, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1"]
    COMPILE_ARGUMENTS += ["-fno-wrapv"]  # Python's own flags have -fwrapv, with which no overflow is seen
    # Beyond that, a compiler takes a quarter of an hour for each level.
    COMPILE_ARGUMENTS += ["-DKVLLM_UP_TO_AVX2", "--param=asan-instrumentation-with-call-threshold=0"]


def sources(folder: str, pattern: str) -> list[str]:
    """Paths relative to this file, as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob(pattern))


def find_nvcc() -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("nvcc") or shutil.which("nvcc", path=home / "bin")


def cuda_command(nvcc: str, output: str | Path) -> list[str]:
    """Compiles and links the CUDA operators for all architectures that this nvcc knows, and for later ones, whose
    drivers translate the newest. The CUDA runtime is inside."""
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    known = [n for n in CUDA_ARCHITECTURES if f"sm_{n}" in listed]
    return [
        nvcc,
        *sources("csrc/cuda", "*.cu"),
        "-std=c++20",
        TORCH_2_11,
        "-DUSE_CUDA",
        *(f"-isystem={path}" for path in include_paths()),
        "-O3",
        "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra",
        "--threads=0",
        *(f"-gencode=arch=compute_{n},code=sm_{n}" for n in known),
        f"-gencode=arch=compute_{known[-1]},code=compute_{known[-1]}",
        "--shared",
        "--cudart=static",
        f"-L{TORCH_LIB_PATH}",
        "-Xlinker=--no-as-needed,-s",  # through libtorch, symbols of the CUDA part are found where there is one
        *("-ltorch", "-ltorch_cpu", "-lc10"),
        f"-o={output}",
    ]


class BuildOperators(BuildExtension):
    def build_extensions(self) -> None:
        print("kvllm: building the operators for", "CPU and CUDA" if find_nvcc() else "the CPU alone: there is no nvcc")
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        if ext.name != CUDA_EXTENSION:
            super().build_extension(ext)
            return
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(cuda_command(find_nvcc(), output), check=True, cwd=ROOT)
        except subprocess.CalledProcessError as error:
            raise CompileError(str(error)) from error


def extensions() -> list[Extension]:
    beyond = ("kernels_avx512", "kernels_amx") if SANITIZERS else ()
    cpu = CppExtension(
        "kvllm._C",
        [path for path in sources("csrc/cpu", "*.cpp") if not Path(path).name.startswith(beyond)],
        depends=sources("csrc/cpu", "*.h"),
        extra_compile_args=COMPILE_ARGUMENTS,
        extra_link_args=LINK_ARGUMENTS,
        py_limited_api=True,
    )
    # Without sources of its own: a torch without CUDA refuses them. If it cannot be built, there is a warning.
    cuda = Extension(CUDA_EXTENSION, [], depends=sources("csrc/cuda", "*.cu*"), py_limited_api=True, optional=True)
    return [cpu, cuda] if find_nvcc() and not SANITIZERS else [cpu]


if __name__ == "__main__":
    setup(
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildOperators},
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
