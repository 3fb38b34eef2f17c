"""Accuracy over retention: budgets are matched, answers graded, differences paired."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.paper import figure_5, settings
from kvllm.errors import ConfigError


@pytest.mark.long
def test_figure_5_compares_methods_at_equal_memory(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--problems", "4", "--sizes", "6", "7", "--retentions", "0.2", "--methods", "kara", "streaming"]
    figure_5.run_figure([*arguments, "--window", "128", "--buffer", "32", "--output", str(tmp_path)])
    trials = json.loads((tmp_path / "figure_5.json").read_text())["trials"]
    assert sorted(trials) == ["full cache", "kara 0.2", "streaming 0.2"]
    full, kara, streaming = (trials[name] for name in sorted(trials))
    assert full["right"] == [True] * 4 and full["cached_lengths"] == full["logical_lengths"]
    assert kara["windows"] > 0 and kara["kept"] < 0.9
    for budget, held, logical in zip(
        kara["cached_lengths"], streaming["cached_lengths"], streaming["logical_lengths"], strict=True
    ):
        assert min(budget, logical) <= held < budget + 64
    assert "Minus kara, in points" in capsys.readouterr().out
    assert (tmp_path / "figure_5.png").stat().st_size > 1000


def figure_5_trials(arguments: list[str], output: Path) -> dict[str, dict]:
    few = ["--problems", "2", "--sizes", "6", "7", "--window", "64", "--buffer", "16", "--output", str(output)]
    figure_5.run_figure([*few, *arguments])
    return json.loads((output / "figure_5.json").read_text())["trials"]


@pytest.mark.long
def test_figure_5_takes_parts_of_kara_away(tmp_path: Path) -> None:
    """Table 1. All compress windows, with as many KV pairs."""
    methods = ["kara", "kara_no_bi", "kara_no_token2chunk"]
    trials = figure_5_trials(["--retentions", "0.2", "--methods", *methods], tmp_path)
    full = trials.pop("full cache")
    assert [trial["compression"]["method"] for trial in trials.values()] == methods
    for trial in trials.values():
        policy = trial["compression"]["policy"]
        assert (policy["window_blocks"], policy["retain_tokens"]) == (64, 16 + 10)
        assert trial["windows"] > 0 and trial["kept"] < full["kept"] == 1


@pytest.mark.long
def test_figure_5_lets_dropped_pairs_come_back(tmp_path: Path) -> None:
    """With little kept, windows alone lose workings that recall gets right; both hold equally many pairs."""
    arguments = ["--retentions", "0.05", "--methods", "kara"]
    name = "kara 0.05"
    alone = figure_5_trials(arguments, tmp_path)[name]
    recalled = figure_5_trials([*arguments, "--recall-bound", "0.05"], tmp_path)[name]
    assert alone["compression"]["recall_bound"] is None and recalled["compression"]["recall_bound"] == 0.05
    assert recalled["exact"] == [True, True] != alone["exact"] and recalled["kept"] < 0.6
    assert recalled["recalled_bytes"] > 0 == alone["recalled_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "kara", "adakv", "--recall-bound", "0.05"], "method='adakv'.*recall_bound"),
        (["--methods", "h2o", "kara"], "kara first"),
        (["--retentions", "2"], "retention='2'.*a share above 0"),
    ],
)
def test_figure_5_refuses_what_does_not_fit(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        figure_5.parse_arguments(arguments)


def test_h2o_keeps_as_many_recent_entries_as_heavy_hitters() -> None:
    kara, prompts = [500, 400], [100, 97]  # prompts are kept in whole blocks of 16: 112 entries
    assert figure_5.recent_of("h2o", kara, prompts) == (400 - 112) // 2
    assert figure_5.recent_of("snapkv", kara, prompts) == 32
    assert figure_5.recent_of("h2o", [150], [100]) == 32


def test_intervals_are_wilson_s() -> None:
    low, high = figure_5.interval(10, 10)
    assert (low, high) == (pytest.approx(10 / (10 + 1.959964**2)), 1)


def test_sizes_are_those_of_the_task() -> None:
    with pytest.raises(ConfigError, match=r"size=.*2 to 48"):
        settings.make_problems(1, (1, 9), seed=0)
