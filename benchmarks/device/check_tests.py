"""The tests that need a GPU: those that are named for one, in files that look for one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.device.log import LeftOut, Log
from benchmarks.device.target import Target

ROOT = Path(__file__).parents[2]
NAMED = "(cuda or gpu or device) and not device_check"  # the tests of this check run it


def run(target: Target, log: Log) -> None:
    if target.dry_run:
        log.left_out("all", "they need a GPU")
    else:
        run_tests(log, [file for file in sorted((ROOT / "tests").glob("test_*.py")) if looks_for_gpu(file)])


def run_tests(log: Log, files: Sequence[Path]) -> None:
    """A row for each test that is named for a GPU."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-k", NAMED, f"--junit-xml={report}"]
        command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not report.is_file():
            raise RuntimeError(f"pytest wrote no report:\n{process.stdout}\n{process.stderr}")
        for case in ElementTree.parse(report).iter("testcase"):
            log.check(f"{case.get('classname')}::{case.get('name')}", partial(outcome, case))


def looks_for_gpu(file: Path) -> bool:
    return "cuda.is_available" in file.read_text()


def outcome(case: ElementTree.Element) -> None:
    for result in case:
        if result.tag == "skipped":
            raise LeftOut(result.get("message", ""))
        if result.tag in ("failure", "error"):
            raise AssertionError(result.text)
