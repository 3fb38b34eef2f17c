"""The benchmark of the server's overhead, with the model in the package and a few short streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving.http_overhead import run


def test_both_sides_are_measured_on_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["--models", "reasoner", "--batch", "4", "--output-tokens", "24", "--rounds", "2", "--patient"]
    run([*batch, "--output", str(tmp_path)])
    report = json.loads((tmp_path / "http_overhead.json").read_text())
    assert report["command"].startswith("python -m benchmarks.serving.http_overhead")
    assert len(report["pairs"]) == 2
    for pair in report["pairs"]:
        for side in (pair["generate"], pair["http"]):
            assert side["step"] > side["model"] > 0 and side["around"] > 0 and side["tokens_per_s"] > 0
        assert pair["ratio"] == pair["http"]["tokens_per_s"] / pair["generate"]["tokens_per_s"]
        assert 0 < pair["http"]["deltas"] <= 1 and pair["http"]["first_token"] > 0
    assert "kvllm serve" in capsys.readouterr().out
