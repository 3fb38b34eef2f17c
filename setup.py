"""Builds the compiled operators; everything else about the package is in pyproject.toml.

The extension uses only PyTorch's stable ABI: built once, it loads in every torch from 2.11 and every Python from 3.11.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

ROOT = Path(__file__).parent
TORCH_2_11 = "0x020b000000000000"

COMPILE_ARGUMENTS = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-Wall",
    "-Wextra",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    f"-fmacro-prefix-map={ROOT.resolve()}/=",
    f"-DTORCH_TARGET_VERSION={TORCH_2_11}",
    *(f"-isystem{path}" for path in include_paths()),  # no warnings about torch's headers
]


def sources(folder: str, pattern: str) -> list[str]:
    """Paths relative to this file, as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob(pattern))


class BuildOperators(BuildExtension):
    def build_extensions(self) -> None:
        print("kvllm: building the CPU operators alone, without CUDA")
        super().build_extensions()


setup(
    ext_modules=[
        CppExtension(
            "kvllm._C",
            sources("csrc/cpu", "*.cpp"),
            depends=sources("csrc/cpu", "*.h"),
            extra_compile_args=COMPILE_ARGUMENTS,
            extra_link_args=["-s"],
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildOperators},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
