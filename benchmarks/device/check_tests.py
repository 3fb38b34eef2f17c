"""The tests that are marked `gpu`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.device.log import LeftOut, Log
from benchmarks.device.target import Target

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"^(@|.*marks=)pytest\.mark\.gpu", re.MULTILINE)


def run(target: Target, log: Log) -> None:
    if target.dry_run:
        log.left_out("all", "they need a GPU")
    else:
        run_tests(log, [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if has_marked(file)])


def has_marked(file: Path) -> bool:
    """Others are not even imported: they may need packages that are not there."""
    return MARK.search(file.read_text()) is not None


def run_tests(log: Log, files: Sequence[Path]) -> None:
    """A row for each marked test, as soon as it has ended."""
    options = ["-q", "-p", "no:cacheprovider", "-m", "gpu", "--continue-on-collection-errors"]
    pytest.main([*options, *map(str, files)], plugins=[Recorder(log)])


class Recorder:
    """A plugin of pytest."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.log.check(report.nodeid, lambda: outcome(report))

    def pytest_runtest_setup(self) -> None:
        if self.log.seconds_left <= 0:
            pytest.skip("there is no time left")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has three reports: one that did not pass, or else that of the call."""
        if report.when == "call" or not report.passed:
            self.log.check(report.nodeid, lambda: outcome(report))


def outcome(report: pytest.CollectReport | pytest.TestReport) -> None:
    if report.skipped:
        raise LeftOut(report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr))
    if report.failed:
        raise AssertionError(report.longreprtext)
