"""The script about the guard: its programs, and what it writes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.quality.guard import NEAR, make_near, run_guard
from tests.benchmarks.test_reasoner import solve


def test_facts_of_the_first_half_lie_near() -> None:
    """The programs are right, and look nothing up but the last names; the reasoner's own programs do."""
    for seed in range(20):
        problem = make_near(random.Random(seed), 30)
        steps, answer = solve(problem.prompt)
        inputs = [pair[0] for pair in problem.prompt.splitlines()[0].split(": ")[1].split(",")]
        names = inputs + [step[6] for step in steps]
        assert problem.answer == answer and problem.working.endswith(f"?{answer}")
        for i, (_, x, a, _, y, b, z, result) in enumerate(steps):
            assert {x, y} <= set(names[: len(inputs) + i][-NEAR:])
            assert f"now {x}{a} and {y}{b}" in problem.working and f"that is {z}{result}." in problem.working
        assert {name for name in answer if name.isalpha()} == set(names[-3:])


def test_the_script_compares_a_stream_with_and_without_guard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--problems", "1", "--sizes", "15", "15", "--max-num-seqs", "2", "--guard-every", "1"]
    run_guard([*sizes, "--guard-kl", "1e-9", "--output", str(tmp_path)])
    full, blind, guarded = json.loads((tmp_path / "guard.json").read_text())["outcomes"].values()
    for outcome in (full, blind, guarded):
        assert sorted(answer["index"] for answer in outcome["answers"]) == [0, 1]
    assert (
        all(answer["right"] and answer["kept"] == 1 for answer in full["answers"]) and not full["compressions_judged"]
    )
    for outcome in (blind, guarded):
        assert outcome["compressions_judged"] == sum(len(answer["divergences"]) for answer in outcome["answers"]) > 0
        assert all(answer["kept"] < 1 for answer in outcome["answers"]) and outcome["judge_share"] > 0
    assert {answer["added_blocks"] for answer in blind["answers"]} == {0} and blind["raised_after"] is None
    assert guarded["answers"][-1]["added_blocks"] > 0 and guarded["raised_after"] > 0
    assert "without guard" in capsys.readouterr().out
