"""The benchmark of the server's overhead, with the model in the package and a few short streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.http_overhead import run


@pytest.mark.long
def test_both_sides_are_measured_on_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["--models", "reasoner", "--batch", "4", "--output-tokens", "24", "--rounds", "2"]
    run([*batch, "--output", str(tmp_path)])
    report = json.loads((tmp_path / "http_overhead.json").read_text())
    assert report["command"].startswith("python -m benchmarks.http_overhead")
    first, second = report["pairs"]["reasoner"]
    assert min(first["generate"], first["serve"], second["generate"], second["serve"]) > 0
    assert f"{(first['generate'] + second['generate']) / 2:,.0f}" in capsys.readouterr().out
