"""Accuracy over retention: budgets are matched, answers graded, differences paired."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.common import answer_tables, compressions, intervals
from benchmarks.common.questions import QuestionSource, read_records, same_answer
from benchmarks.common.trials import FULL, Outcome
from benchmarks.paper import figure_5, table_1
from kvllm.errors import ConfigError


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
    assert "Minus kara, same questions" in capsys.readouterr().out
    assert (tmp_path / "figure_5.png").stat().st_size > 1000


def figure_5_trials(arguments: list[str], output: Path) -> dict[str, dict]:
    few = ["--problems", "2", "--sizes", "6", "7", "--window", "64", "--buffer", "16", "--output", str(output)]
    figure_5.run_figure([*few, *arguments])
    return json.loads((output / "figure_5.json").read_text())["trials"]


def test_figure_5_takes_budgets_in_kv_pairs(tmp_path: Path) -> None:
    """Windows end just below the budget if the text is as long as with the full cache, cuts just above it."""
    trials = figure_5_trials(["--budgets", "270", "--methods", "keydiff", "--windows", "keydiff"], tmp_path)
    full, cut, windows = (trials[name] for name in ("full cache", "keydiff 270", "keydiff, windows 270"))
    same = [n for n in range(2) if windows["logical_lengths"][n] == full["logical_lengths"][n]]
    assert same and all(length > 300 for length in full["logical_lengths"])
    for n in same:
        assert 270 - (length := full["logical_lengths"][n]) // 48 < windows["cached_lengths"][n] <= 270 < length
    assert all(270 <= held < 270 + 64 for held in cut["cached_lengths"])
    assert cut["cpu_seconds"] > cut["event_seconds"] > full["event_seconds"] == 0


def test_figure_5_compresses_prompts_and_goes_on_with_what_it_has(tmp_path: Path) -> None:
    arguments = ["--retentions", "0.2", "--unprotected", "--methods", "kara"]
    first = figure_5_trials(arguments, tmp_path)
    again = figure_5_trials([*arguments, "keydiff", "--resume"], tmp_path)
    assert {name: again[name] for name in first} == first  # the seconds, too
    kara, keydiff = again["kara 0.2"], again["keydiff 0.2"]
    assert kara["compression"]["compress_prompt"] and not keydiff["compression"]["protect_prompt"]
    assert kara["kept"] < 0.4  # with whole prompts 45%
    for budget, held in zip(kara["cached_lengths"], keydiff["cached_lengths"], strict=True):
        assert held <= budget + 64


@pytest.mark.long
def test_figure_5_lets_dropped_pairs_come_back(tmp_path: Path) -> None:
    """With little kept, windows alone lose workings that recall gets right; both hold equally many pairs."""
    arguments = ["--retentions", "0.05", "--methods", "kara_sharp"]
    name = "kara_sharp 0.05"
    alone = figure_5_trials(arguments, tmp_path)[name]
    recalled = figure_5_trials([*arguments, "--recall-bound", "0.05", "--resume"], tmp_path)[name]
    assert alone["compression"]["recall_bound"] is None and recalled["compression"]["recall_bound"] == 0.05
    assert recalled["fingerprint"] != alone["fingerprint"] and recalled["kept"] < 0.6
    assert recalled["exact"] == [True, True] != alone["exact"]
    assert recalled["recalled_bytes"] > 0 == alone["recalled_bytes"]
    in_few_bits = figure_5.parse_arguments([*arguments, "--recall-period", "1", "--recall-dtype", "int4"]).recall
    assert in_few_bits == {"recall_bound": None, "recall_period": 1, "recall_chunks": 2, "recall_dtype": "int4"}
    with pytest.raises(ConfigError, match="method='adakv'.*recall_bound"):
        figure_5.parse_arguments(["--methods", "kara", "adakv", "--recall-bound", "0.05"])


@pytest.mark.parametrize("length", [100, 130, 131, 500])
@pytest.mark.parametrize("start", [0, 30])
def test_windows_that_leave_a_budget(length: int, start: int) -> None:
    """Windows of 40 KV pairs with a buffer of 10 are compressed before the step that finds them full."""

    def held(retained: int) -> int:
        cached, tail = length, 0
        for _ in range(start, length - 1):
            tail += 1
            if tail == 40:
                cached, tail = cached - (40 - retained), 10
        return cached

    least = held(10)
    for budget in range(least, length + 10):
        retained = compressions.retained_of(budget, length, start, 40, 10)
        assert held(retained) <= budget and (retained == 40 or held(retained + 1) > budget)
    with pytest.raises(ConfigError, match=f"at least {least} for a text of {length} tokens"):
        compressions.retained_of(least - 1, length, start, 40, 10)


SMALL = ["--problems", "2", "--sizes", "6", "7", "--retention", "0.2"]


def run_script(script: ModuleType, arguments: list[str], output: Path) -> list[dict]:
    """The trials it writes, in its order."""
    script.run_table([*SMALL, *arguments, "--output", str(output)])
    name = script.__name__.rpartition(".")[2]
    assert (output / f"{name}.png").stat().st_size > 1000
    trials = json.loads((output / f"{name}.json").read_text())["trials"]
    return sorted(trials.values(), key=lambda trial: trial["compression"] is None)


@pytest.mark.long
def test_table_1_takes_parts_of_kara_away(tmp_path: Path) -> None:
    *parts, full = run_script(table_1, ["--window", "96", "--buffer", "16"], tmp_path)
    assert {trial["compression"]["method"] for trial in parts} == {"kara", "kara_no_bi", "kara_no_token2chunk"}
    for trial in parts:
        assert (trial["compression"]["window_blocks"], trial["compression"]["retain_tokens"]) == (96, 16 + 16)
        assert trial["windows"] > 0 and trial["kept"] < full["kept"] == 1


def test_others_are_compared_with_the_first_that_has_a_column() -> None:
    right, wrong = (
        Outcome(
            right=[is_right],
            exact=[is_right],
            cached_lengths=[8],
            logical_lengths=[10],
            tokens=[4],
            windows=1,
            seconds=1.0,
            cpu_seconds=1.0,
            event_seconds=0.5,
        )
        for is_right in (True, False)
    )
    outcomes = {FULL: right, "fewer bits 0.2": right, "least bits 0.2": wrong}
    text = answer_tables.show(["all bits", "fewer bits", "least bits"], "share", ["0.2"], outcomes)
    compared = text.partition("Minus fewer bits, same questions, in points")[2].split("\n\n")[0]
    rows = {row[:12].strip(): row[12:].split() for row in compared.splitlines()}
    assert rows["all bits"] == ["-"]
    assert rows["fewer bits"][:1] == ["+0.0"] and rows["least bits"][:1] == ["-100.0"]


def test_h2o_keeps_as_many_recent_entries_as_heavy_hitters() -> None:
    kara, prompts = [500, 400], [100, 97]  # prompts are kept in whole blocks of 16: 112 entries
    assert compressions.recent_of("h2o", 32, kara, prompts) == (400 - 112) // 2
    assert compressions.recent_of("snapkv", 32, kara, prompts) == 32
    assert compressions.recent_of("h2o", 32, [150], [100]) == 32


def test_differences_are_paired() -> None:
    first, second = [True] * 8 + [False] * 2, [True] * 2 + [False] * 6 + [True, False]
    difference = intervals.paired_difference(first, second)
    assert difference.mean == pytest.approx(0.5)
    assert difference.p_value == pytest.approx(2 * (1 + 7) / 2**7)  # one loss in seven that differ
    low, high = intervals.interval(10, 10)
    assert (low, high) == (pytest.approx(10 / (10 + 1.959964**2)), 1)


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        (r"\frac{1}{2}", r"so it is \boxed{0.5}.", True),
        ("x^2+1", r"\boxed{1+x^2}", True),
        ("12", r"\boxed{13}", False),
        ("5", "", False),
    ],
)
def test_mathematical_answers(answer: str, text: str, right: bool) -> None:
    assert same_answer(answer, text) == right


def test_wrong_questions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--sizes.*2 to 48"):
        QuestionSource(sizes=(1, 9))
    with pytest.raises(ConfigError, match="no such file"):
        read_records(tmp_path / "nothing.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n{"problem": "2+2"}\n')
    with pytest.raises(ConfigError, match="line 2 is no JSON object with"):
        read_records(tmp_path / "bad.jsonl")
    with pytest.raises(ConfigError, match="--retention='2'"):
        compressions.check_retention("--retention", "2")
