"""The soak of the server, for some seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving.soak import run


def test_a_few_seconds_of_traffic_are_reported_and_nothing_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["--minutes", "0.08", "--every", "0.04", "--users", "6", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["wrong"] == [] and found["references"] > 0
    first, *_, last = found["readings"]
    assert last["steps"] > first["steps"] and last["resident"] > 0
    assert sum(count for *_, count in found["outcomes"]) + found["references"] >= last["requests"] > 0
    assert "nothing was wrong" in capsys.readouterr().out
    assert (tmp_path / "soak.png").stat().st_size > 1000
