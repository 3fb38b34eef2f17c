"""The benchmarks of tiers and of the simulator, run small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import prefix_tiers
from benchmarks.common import shapes
from benchmarks.paper import simulated_tables
from kvllm.errors import ConfigError


@pytest.mark.long  # five processes
def test_tiers_save_prompt_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--conversations", "4", "--fitting", "1", "--at-once", "1", "--turns", "2", "--input-len", "32"]
    prefix_tiers.benchmark([*sizes, "--output-len", "3", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "prefix_tiers.json").read_text())
    assert found["answers_equal"] and "All answers are equal." in capsys.readouterr().out
    computed = {name: turns["computed_tokens"] for name, turns in found["engines"].items()}
    assert computed["no tier"] == [4 * 32, 4 * 67]
    kept = 4 * (67 - 32)  # the two whole blocks of the first turn
    assert computed["host"] == computed["host and disk"] == [4 * 32, kept]
    assert computed["after a restart"] == [kept]


@pytest.mark.long
def test_tables_at_the_papers_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With so little memory that two of six sequences are preempted, unless they are compressed."""
    model = shapes.find_model("8b", tmp_path)
    sizes = ["--requests", "6", "--max-num-seqs", "6", "--gpu-memory-utilization", "0.189"]
    simulated_tables.tables([*sizes, "--model-config", str(model), "--output", str(tmp_path)])
    runs = json.loads((tmp_path / "simulated_tables.json").read_text())["runs"]["6"]
    assert runs["full cache"]["tokens_recomputed"] > 0 == runs["mean_attention, 1 of 3"]["tokens_recomputed"]
    assert "+12.75%" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--turns", "1"], ["--at-once", "9"], ["--conversations", "0"]])
def test_wrong_sizes_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=arguments[0] if arguments[0] != "--at-once" else "--fitting=8"):
        prefix_tiers.parse_arguments(arguments)
