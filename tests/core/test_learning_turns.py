"""Which compressions are learned from: the first windows, and one in so many after them."""

from __future__ import annotations

from random import Random

import pytest

from kvllm.compression.specs import SPECS
from kvllm.core.compression_planner import EVERY, FIRST_WINDOWS, LearningTurns


def take(turns: LearningTurns, num_windows: int) -> bool:
    learns = turns.learns_now
    turns.count(num_windows, learns)
    return learns


def test_single_windows_are_learned_from_at_first_and_then_one_in_so_many() -> None:
    turns = LearningTurns(SPECS["linear_scorer"])
    learned = [window for window in range(200) if take(turns, 1)]
    assert learned == [*range(FIRST_WINDOWS), *range(FIRST_WINDOWS - 1 + EVERY, 200, EVERY)]


@pytest.mark.parametrize("seed", range(20))
def test_compressions_of_several_windows_leave_no_longer_gaps(seed: int) -> None:
    rng, turns = Random(seed), LearningTurns(SPECS["linear_scorer"])
    windows = learned = 0
    last = None  # window with which the last compression began that was learned from after the first ones
    for _ in range(200):
        count = rng.randint(1, 6)
        due = windows < FIRST_WINDOWS if last is None else windows >= last + EVERY
        assert take(turns, count) == due
        if due:
            learned += count
            last = windows if windows + count >= FIRST_WINDOWS else None
        windows += count
    assert learned < windows / 4


def test_other_methods_are_never_taught() -> None:
    turns = LearningTurns(SPECS["kara_sharp"])
    assert not any(take(turns, 1) for _ in range(100))
