"""The sections of a device check.

Each has a process of its own (section_process.py). So a fault of the device, or a kernel that never ends, costs one
section, and of that section only the rows that were not written yet.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.device.log import FAILED, LEFT_OUT, Row, read_rows

ROOT = Path(__file__).parents[2]
GRACE_SECONDS = 15.0
"""A section ends by itself at its limit; it is killed this much later."""
LAST_WORDS = 6000
"""Characters that are kept of the output of a process that fails."""
DRY_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


class Section(NamedTuple):
    """module: its `run(target, log)` writes the rows. seconds: its limit. title: a line about its findings.

    part: the sections of a part share ten minutes. None: those of the part that comes next.
    """

    module: str
    seconds: float
    title: str
    part: str | None


PARTS = ("sanitizer", "correctness", "memory", "figures")
"""In the order in which they run: a figure of what is wrong, or writes where it must not, is of no use."""
SECTIONS = {
    "extension": Section("benchmarks.device.extension", 60, "Compiled operators", None),
    "sanitizer": Section("benchmarks.device.sanitizer", 490, "Memory errors and races of kernels", "sanitizer"),
    "kernels": Section("benchmarks.device.check_kernels", 120, "Kernels against float64", "correctness"),
    "quantized": Section("benchmarks.device.check_quantized", 60, "Kernels over quantized caches", "correctness"),
    "sampling": Section("benchmarks.device.check_draws", 30, "Kernels that choose tokens", "correctness"),
    "vectors": Section("benchmarks.device.check_vectors", 30, "Golden vectors", "correctness"),
    "engine": Section("benchmarks.device.check_engine", 150, "Engine against transformers and the CPU", "correctness"),
    "tests": Section("benchmarks.device.check_tests", 90, "Tests that need a GPU", "correctness"),
    "graphs": Section("benchmarks.device.graph_memory", 120, "GPU memory that CUDA graphs take", "memory"),
    "ceilings": Section("benchmarks.device.ceilings", 30, "What the device can do at most", "figures"),
    "times": Section("benchmarks.device.kernels", 80, "Kernels against their floors", "figures"),
    "decode": Section("benchmarks.device.decode", 90, "Decode steps against their floors", "figures"),
    "tables": Section("benchmarks.device.tables", 170, "Tables 2 and 3: 64 GB for weights and cache", "figures"),
    "events": Section("benchmarks.device.events", 90, "Compression events, and the longest stall", "figures"),
    "transformers": Section("benchmarks.device.peer", 60, "Decode steps of transformers", "figures"),
}
"""In the order in which they run. Together they may take less time than the sum: see `benchmarks.device_check`."""


def run_section(name: str, section: Section, seconds: float, dry_run: bool, rows: Path) -> dict[str, Any]:
    """Run a section in a new process for at most `seconds`; what it found, as it goes into the report.

    status: "passed"; "failed" if the process or a row did, or there is no row; "timed out"; "left out" if all rows
    were. error: the end of its output, if it failed. rows: the file to which the process appends what it finds.
    """
    begin = time.monotonic()
    rows.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "output"
        command = [sys.executable, "-m", "benchmarks.device.section_process", section.module, str(seconds), str(rows)]
        environment = {**os.environ, **DRY_ENVIRONMENT} if dry_run else None
        with output.open("wb") as file:
            process = subprocess.Popen(
                command + ["--dry-run"] * dry_run,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,  # of its own, to end with all that it starts
            )
            timed_out = not _wait(process, seconds + GRACE_SECONDS)
        found = read_rows(rows)
        last_words = output.read_text(errors="replace")[-LAST_WORDS:]
    return {
        "name": name,
        "title": section.title,
        "status": "timed out" if timed_out else status_of(process.returncode, found),
        "seconds": time.monotonic() - begin,
        "limit_seconds": seconds,
        "rows": found,
        "error": last_words if process.returncode != 0 else None,
    }


def status_of(exit_code: int, rows: list[Row]) -> str:
    statuses = {row["status"] for row in rows}
    if exit_code != 0 or not rows or FAILED in statuses:
        return "failed"
    return LEFT_OUT if statuses == {LEFT_OUT} else "passed"


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process ends in time. Its whole group does, then or now."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    else:
        return True
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
