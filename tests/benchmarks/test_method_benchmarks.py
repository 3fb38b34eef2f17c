"""The benchmark that compares query strides, end to end on a few problems."""

from __future__ import annotations

import json

import pytest

from benchmarks.common import problem_sets
from benchmarks.quality import query_stride
from kvllm.errors import ConfigError


@pytest.fixture
def short_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of two windows instead of five."""
    monkeypatch.setattr(problem_sets, "LINES", (12, 16))
    for module in (problem_sets, query_stride):
        monkeypatch.setattr(module, "MAX_TOKENS", 700)


@pytest.mark.usefixtures("short_problems")
def test_query_stride(tmp_path, capsys) -> None:
    query_stride.run_strides(
        ["--strides", "1", "4", "--problems", "6", "--max-num-seqs", "6", "--output", str(tmp_path)]
    )
    written = json.loads((tmp_path / "query_stride.json").read_text())["strides"]
    assert written["1"]["overlap"] == 1 and 0.2 < written["4"]["overlap"] < 1
    assert all(run["measurement"]["windows_compressed"] > 0 for run in written.values())
    assert "kept as with" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "arguments", "message"),
    [
        (query_stride.run_strides, ["--strides", "2", "0"], "--strides"),
    ],
)
def test_wrong_arguments(run, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(arguments)
