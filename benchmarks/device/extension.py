"""The compiled operators: loaded as they are, or built here first."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.device.log import Figures, LeftOut, Log
from benchmarks.device.target import Target
from kvllm._extension import has_cuda_operators, load_extension
from kvllm.errors import KvLLMError

ROOT = Path(__file__).parents[2]
BUILD = [sys.executable, "setup.py", "build_ext", "--inplace"]


def run(target: Target, log: Log) -> None:
    if not target.dry_run and not _complete():
        log.check("build", build)
    log.check("CPU operators", load_extension)
    log.check("CUDA operators", partial(cuda_operators, target))


def _complete() -> bool:
    try:
        return has_cuda_operators()
    except KvLLMError:  # built for something else
        return False
    finally:
        has_cuda_operators.cache_clear()


def build() -> Figures:
    begin = time.perf_counter()
    process = subprocess.run(BUILD, cwd=ROOT, capture_output=True, text=True)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(BUILD)} failed:\n{process.stdout[-4000:]}\n{process.stderr[-4000:]}")
    return {"build_seconds": time.perf_counter() - begin}


def cuda_operators(target: Target) -> None:
    if not has_cuda_operators():
        wanting = "torch has no CUDA" if target.dry_run else "there is no nvcc, so Triton kernels take their place"
        raise LeftOut(f"not loaded: {wanting}")
