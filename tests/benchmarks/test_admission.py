"""The sweep of admission's watermarks."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.serving.admission import sweep
from kvllm.engine_args import DEFAULT_MODEL


def test_every_pair_of_watermarks_gets_a_row(tmp_path: Path, capsys) -> None:
    model = ["--model-config", str(DEFAULT_MODEL / "config.json"), "--output", str(tmp_path)]
    load = ["--requests", "24", "--input-len", "40", "--output-len", "100", "--num-blocks", "60"]
    sweep([*model, *load, "--max-num-seqs", "16", "--low", "0", "0.2", "--high", "0.1"])
    rows = json.loads((tmp_path / "admission.json").read_text())["rows"]
    pairs = [(0.0, None), (0.2, None), (0.0, 0.1)]  # a high watermark below the low one is left out
    assert [(row["low"], row["high"]) for row in rows] == pairs * 2
    careless, careful, closed = (row["preemptions"] for row in rows[:3])
    assert careless > closed > 0 and careless > careful
    printed = capsys.readouterr().out
    assert all(f"{row['output_tokens_per_s']:,.0f}" in printed for row in rows)
