"""The benchmarks of tiers, run small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import prefix_tiers, swap
from kvllm.errors import ConfigError


def test_swap_computes_nothing_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--requests", "3", "--input-len", "24", "--output-len", "40", "--pool-fraction", "0.6", "--repeats", "1"]
    swap.benchmark([*sizes, "--lengths", "48", "--offloading-size", "0.1", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "swap.json").read_text())
    runs = {mode: each["runs"][0] for mode, each in found["modes"].items()}
    assert list(runs) == ["never", "always", "auto"]
    assert all(run["preemptions"] > 0 and run["output_tokens"] == 120 for run in runs.values())
    assert runs["never"]["tokens_recomputed"] > 0 == runs["never"]["swapped_out"]
    assert runs["always"]["swapped_out"] == runs["always"]["preemptions"]
    (alone,) = found["alone"]
    assert alone["bytes"] == 2 * 3 * 12 * 2 * 2 * 16 * 64 * 2 and alone["again_ms"] > 0 < alone["swapped_ms"]
    assert (tmp_path / "swap.png").read_bytes().startswith(b"\x89PNG")
    assert "sequences swapped" in capsys.readouterr().out


@pytest.mark.long  # five processes
def test_tiers_save_prompt_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--conversations", "4", "--fitting", "1", "--at-once", "1", "--turns", "2", "--input-len", "32"]
    prefix_tiers.benchmark([*sizes, "--output-len", "3", "--offloading-size", "0.1", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "prefix_tiers.json").read_text())
    assert found["answers_equal"] and "All answers are equal." in capsys.readouterr().out
    computed = {name: turns["computed_tokens"] for name, turns in found["engines"].items()}
    assert computed["no tier"] == [4 * 32, 4 * 67]
    kept = 4 * (67 - 32)  # the two whole blocks of the first turn
    assert computed["host"] == computed["host and disk"] == [4 * 32, kept]
    assert computed["after a restart"] == [kept]


@pytest.mark.parametrize("arguments", [["--turns", "1"], ["--at-once", "9"], ["--conversations", "0"]])
def test_wrong_sizes_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=arguments[0] if arguments[0] != "--at-once" else "--fitting=8"):
        prefix_tiers.parse_arguments(arguments)
