"""The faults of clients, a few of each kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving.faults import run


def test_no_fault_of_a_client_harms_the_server_or_its_neighbour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--requests", "300", "--rules", "8", "--slow", "4", "--writers", "0", "--connections", "200"]
    run([*few, "--output", str(tmp_path)])
    found = json.loads((tmp_path / "faults.json").read_text())
    assert found["wrong"] == []
    parts = {part["name"]: part for part in found["parts"]}
    assert parts["random bodies"]["requests"] == 150 and parts["random bodies"]["statuses"]["400"] > 75
    assert parts["broken HTTP"]["statuses"]["400"] > 20
    assert parts["exploding rules"]["statuses"] == {"400": 8}
    assert set(parts["slow readers"]["statuses"]) == {"200, whole", "client gone"}
    assert all(part["neighbours"] > 0 for part in parts.values())
    assert len(found["idle_seconds"]) == 3
    assert "nothing was wrong" in capsys.readouterr().out
