"""Memory errors and races of kernels: the sections that check these, under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.device.log import FAILED, LEFT_OUT, PASSED, Figures, LeftOut, Log, read_rows
from benchmarks.device.section import SECTIONS
from benchmarks.device.target import Target

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck")
CHECKED = ("kernels", "sampling", "quantized")
FOUND = 86
"""The exit code with which compute-sanitizer says that it found something."""
OF_CHECKS = 0.7
"""The share of a tool's time in which checks begin: the last one may take long, and errors are reported behind it."""
LAST_WORDS = 4000
"""Characters that are kept of what a tool prints."""
# Of each tensor the bounds are known only where torch does not cut tensors out of larger allocations.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def run(target: Target, log: Log) -> None:
    sanitizer = find_sanitizer()
    runs = [(tool, name) for tool in TOOLS for name in CHECKED]
    for index, (tool, name) in enumerate(runs):
        title = f"{tool}: {name}"
        if target.dry_run:
            log.left_out(title, "it needs a GPU")
        elif sanitizer is None:
            log.left_out(title, "there is no compute-sanitizer on the PATH or in CUDA_HOME/bin: it is part of CUDA")
        else:
            seconds = log.seconds_left / (len(runs) - index)
            log.check(title, partial(check_under, sanitizer, tool, SECTIONS[name].module, seconds))


def find_sanitizer() -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=home / "bin")


def check_under(sanitizer: str, tool: str, module: str, seconds: float) -> Figures:
    """Run a section under a tool for some seconds.

    Raises AssertionError if the tool finds something, a check fails or none is made; LeftOut where the tool does not
    know the device.
    """
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows"
        process = subprocess.run(
            [*command(sanitizer, tool), module, str(OF_CHECKS * seconds), str(rows)],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
        )
        statuses = [row["status"] for row in read_rows(rows)]
    if "Device not supported" in process.stdout:
        raise LeftOut("compute-sanitizer does not support this device, or not under this kernel")
    counts = {status: statuses.count(status) for status in (PASSED, FAILED, LEFT_OUT)}
    if process.returncode != 0 or counts[FAILED] or not counts[PASSED]:
        what = "found something" if process.returncode == FOUND else f"ended with exit code {process.returncode}"
        raise AssertionError(f"{tool} {what}, checks: {counts}\n{process.stdout[-LAST_WORDS:]}")
    return {"checks_made": counts[PASSED], "checks_left_out": counts[LEFT_OUT]}


def command(sanitizer: str, tool: str) -> list[str]:
    """Errors that calls of CUDA return are not the kernels': torch asks for what a device may not have."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]
    return [sanitizer, *options, sys.executable, "-m", "benchmarks.device.section_process"]
