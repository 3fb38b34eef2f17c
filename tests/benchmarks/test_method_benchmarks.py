"""The benchmark that compares methods, end to end on a few problems."""

from __future__ import annotations

import json

import pytest

from benchmarks.common import problem_sets
from benchmarks.quality import methods
from kvllm.compression.specs import SPECS
from kvllm.errors import ConfigError


def test_every_method_runs_under_every_policy_that_allows_it() -> None:
    names = {variant.name for variant in methods.variants(list(SPECS), methods.POLICIES)}
    assert {"full cache", "kara, pressure", "adakv, threshold", "keydiff, periodic", "keydiff, threshold"} <= names
    assert not {"kara, threshold", "adakv, pressure"} & names


@pytest.fixture
def short_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of two windows instead of five."""
    monkeypatch.setattr(problem_sets, "LINES", (12, 16))
    monkeypatch.setattr(problem_sets, "MAX_TOKENS", 700)


@pytest.mark.usefixtures("short_problems")
def test_methods(tmp_path, capsys) -> None:
    arguments = ["--methods", "kara", "sliding_window", "--policies", "periodic", "threshold", "--problems", "6"]
    methods.run_methods([*arguments, "--max-num-seqs", "6", "--threads", "1", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "methods.json").read_text())
    assert list(written["runs"]) == [
        "full cache",
        "kara, periodic",
        "sliding_window, periodic",
        "sliding_window, threshold",
    ]
    full, kara = written["runs"]["full cache"], written["runs"]["kara, periodic"]
    assert full["exact_workings"] == 6 and full["measurement"]["windows_compressed"] == 0
    assert kara["measurement"]["windows_compressed"] > 0 and kara["measurement"]["recompute_seconds"] > 0
    assert written["runs"]["sliding_window, threshold"]["measurement"]["recompute_seconds"] == pytest.approx(
        0, abs=0.05
    )
    table = capsys.readouterr().out
    assert all(name in table for name in written["runs"])
    assert (tmp_path / "methods.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("run", "arguments", "message"),
    [
        (methods.run_methods, ["--problems", "0"], "--problems=0"),
        (methods.run_methods, ["--threads", "0"], "--threads=0"),
    ],
)
def test_wrong_arguments(run, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(arguments)
