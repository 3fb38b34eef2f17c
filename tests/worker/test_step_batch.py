"""The batch of a step is kept only while its sequences are the same."""

from __future__ import annotations

import numpy as np
import pytest

from kvllm.core.protocol import Decodes, PrefillChunk, SequenceStart, StepPlan
from kvllm.sampling_params import SamplingParams
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.state import PartTables, SequenceState
from kvllm.worker.step_batch import BatchKeeper

DECODES = Decodes([3, 5], [7, 8])


def states_in(*table_slots: int) -> dict[int, SequenceState]:
    tables, row = PartTables(4, [1], block_size=1), SampleRow(SamplingParams(), 0, [1], [])
    return {3 + 2 * i: SequenceState([1], slot, tables, row) for i, slot in enumerate(table_slots)}


def step(keeper: BatchKeeper, plan: StepPlan, states: dict[int, SequenceState]) -> list[int]:
    """The table slots of a plan's batch."""
    keeper.follow(plan)
    return keeper.batch(plan, states).table_slots.tolist() if plan.num_seqs else []


def test_steps_that_decode_the_same_sequences_share_a_batch() -> None:
    keeper, states = BatchKeeper(), states_in(2, 0)
    first = keeper.batch(StepPlan(decodes=DECODES), states)
    assert keeper.batch(StepPlan(decodes=Decodes([3, 5], [9, 9])), states) is first
    assert step(keeper, StepPlan(decodes=Decodes([5, 3], [9, 9])), states) == [0, 2]
    assert step(keeper, StepPlan(decodes=DECODES, chunks=[PrefillChunk(5, 2, [], False)]), states) == [2, 0, 0]
    assert step(keeper, StepPlan(decodes=DECODES), states) == [2, 0]


def test_sequences_have_their_tokens_before_anything_reads_them() -> None:
    """A draw depends on the number of tokens, so its sequence gets them at once; the others before the next step."""
    for temperature, at_once in ((0, [1]), (1, [1, 7])):
        keeper, states = BatchKeeper(), states_in(2, 0)
        states[3].sample_row = SampleRow(SamplingParams(temperature=temperature), 0, [1], [])
        states[5].sample_row = SampleRow(SamplingParams(temperature=0), 0, [1], [])
        batch = keeper.batch(StepPlan(decodes=DECODES), states)
        batch.extend(np.array([7, 8]))
        assert states[3].token_ids == at_once
        step(keeper, StepPlan(decodes=DECODES, chunks=[PrefillChunk(5, 2, [], False)]), states)
        assert [states[3].token_ids, states[5].token_ids] == [[1, 7], [1, 8]]
        assert [states[3].sample_row.output_token_ids, states[5].sample_row.output_token_ids] == [[7], [8]]


START = SequenceStart(3, [1], 1, 0, SamplingParams(), 0)


@pytest.mark.parametrize("change", [StepPlan(new_seqs=[START]), StepPlan(dropped_seq_ids=[3]), StepPlan(reset=True)])
def test_sequences_that_start_again_have_other_states(change: StepPlan) -> None:
    """Even where the plan that starts or drops them computes nothing."""
    keeper = BatchKeeper()
    assert step(keeper, StepPlan(decodes=DECODES), states_in(2, 0)) == [2, 0]
    step(keeper, change, states_in(1, 0))
    assert step(keeper, StepPlan(decodes=DECODES), states_in(1, 0)) == [1, 0]
