"""How many simulated machines keep a service level."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import machines
from tests.helpers.checkpoints import make_checkpoint


def test_fewer_machines_keep_the_level_under_compression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    load = tmp_path / "load.json"
    load.write_text(json.dumps({"num_requests": 40, "input_len": 8, "output_len": 200, "range_ratio": 0}))
    options = ["--hardware", "h100", "--num-blocks", "40", "--rate", "1000", "--within", "0.6"]
    machines.main([str(tmp_path), "--workload", str(load), *options, "--machines", "1", "2", "--output", str(tmp_path)])
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()[2:6]]
    fewest = {row[0]: int(next(cell for cell in row[1:] if cell)) for row in rows}
    assert fewest["bfloat16, pressure"] < fewest["bfloat16"] == 2
    assert (tmp_path / "machines.png").exists()
