"""Products of the instruction sets that this processor lacks, on an emulated one.

Those of Arm need Debian's packages g++-aarch64-linux-gnu and qemu-user-static. Those of x86-64 need a command in
KVLLM_X86_EMULATOR that runs a static program on a processor with AVX-512, bfloat16 and AMX.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
X86_EMULATOR = "KVLLM_X86_EMULATOR"

pytestmark = pytest.mark.xdist_group("emulated_levels")  # one process builds a program for all of its tests


def build(compiler: str, program: Path) -> Path:
    """check_products.cpp with the kernels."""
    if shutil.which(compiler) is None:
        pytest.skip(f"needs the compiler {compiler}, which is not installed")
    kernels = (ROOT / "csrc/cpu").glob("kernels_*.cpp")
    sources = [*kernels, ROOT / "csrc/cpu/isa.cpp", ROOT / "tests/kernels/check_products.cpp"]
    options = ["-std=c++20", "-O2", "-ffp-contract=off", "-static"]
    subprocess.run([compiler, *options, *map(str, sources), "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("qemu-aarch64-static") is None:
        pytest.skip("needs the emulator qemu-aarch64-static, which is not installed")
    return build("aarch64-linux-gnu-g++", tmp_path_factory.mktemp("arm") / "check_products")


@pytest.fixture(scope="module")
def x86_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if X86_EMULATOR not in os.environ:
        pytest.skip(f"needs an emulator of x86-64 in {X86_EMULATOR}")
    return build("g++", tmp_path_factory.mktemp("x86") / "check_products")


def run(emulator: list[str], program: Path, level: str) -> tuple[int, str]:
    result = subprocess.run([*emulator, str(program), level], capture_output=True, text=True, timeout=600)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("level", ["baseline", "arm_bf16"])
def test_arm(arm_program: Path, level: str) -> None:
    status, output = run(["qemu-aarch64-static", "-cpu", "max"], arm_program, level)
    assert status == 0, output


def test_arm_without_bfloat16(arm_program: Path) -> None:
    status, output = run(["qemu-aarch64-static", "-cpu", "cortex-a57"], arm_program, "arm_bf16")
    assert (status, output) == (77, "this processor stops at baseline\n")


@pytest.mark.parametrize("level", ["avx512", "avx512_vnni", "avx512_bf16", "amx"])
def test_x86(x86_program: Path, level: str) -> None:
    status, output = run(shlex.split(os.environ[X86_EMULATOR]), x86_program, level)
    assert status == 0, output
