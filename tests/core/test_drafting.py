"""Drafts: what is found in texts, who sees whose outputs, and how many tokens are worth a try."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvllm.config import EngineConfig, SpeculativeConfig
from kvllm.core.drafting import lookup
from kvllm.core.drafting.index import MOST_PLACES, RunIndex
from kvllm.core.drafting.lookup import NgramDrafter, SuffixDrafter
from kvllm.core.drafting.step_cost import StepCost, measure_steps
from kvllm.core.executor import Executor
from kvllm.core.protocol import StepPlan, StepResult
from kvllm.core.sequence import Sequence, ServiceClass
from kvllm.core.speculation import PAUSE, Speculation
from kvllm.sampling_params import SamplingParams
from kvllm.stats import EngineStats
from tests.helpers.examples import examples

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def sequence(token_ids: list[int], seq_id: int = 0, prompt_length: int = 1, salt: str | None = None) -> Sequence:
    service_class = ServiceClass(cache_salt=salt)
    seq = Sequence(
        seq_id, "0", token_ids[:prompt_length], SamplingParams(), max_length=1000, service_class=service_class
    )
    seq.token_ids += token_ids[prompt_length:]
    return seq


def equal_before(text: list[int], place: int, other: list[int], most: int) -> int:
    """How many tokens before index `place` of a text are the last ones of another."""
    count = 0
    while count < min(most, place, len(other)) and text[place - count - 1] == other[-count - 1]:
        count += 1
    return count


@given(text=TOKENS, other=TOKENS, length=st.integers(1, 3), more=st.integers(0, 5), cut=st.integers(0, 40))
@settings(max_examples=examples(300))
def test_the_longest_of_the_last_places_is_found(
    text: list[int], other: list[int], length: int, more: int, cut: int
) -> None:
    index = RunIndex(length)
    index.extend(text[:cut])
    index.extend(text[cut:])
    for query, is_own in ((other, False), (text, True)):
        places = [
            place
            for place in range(length, len(text) + 1)
            if equal_before(text, place, query, length) == length and not (is_own and place == len(text))
        ]
        if is_own and len(text) >= length:  # the end of the text is remembered, too
            places = places[-(MOST_PLACES - 1) :]
        lengths = {place: equal_before(text, place, query, length + more) for place in places[-MOST_PLACES:]}
        best = max(lengths.values(), default=0)
        expected = (best, max(place for place in lengths if lengths[place] == best)) if lengths else (0, 0)
        assert index.longest(query, length + more, is_own=is_own) == expected


def test_what_repeats_is_drafted_to_go_on() -> None:
    drafter = NgramDrafter(2, 4)
    assert drafter.propose(sequence([1, 2, 3, 9, 1, 2]), 5).token_ids == [3, 9, 1, 2, 3]
    assert drafter.propose(sequence([7, 7, 7], 1), 3) == ([7, 7, 7], 2)
    assert not drafter.propose(sequence([1, 2, 3], 2), 3).token_ids


def test_more_equal_tokens_win_over_later_ones() -> None:
    seq = sequence([5, 1, 2, 3, 8, 8, 2, 3, 9, 9, 1, 2, 3])
    assert NgramDrafter(2, 4).propose(seq, 1) == ([8], 3)
    assert NgramDrafter(2, 2).propose(seq, 1) == ([9], 2)


def test_outputs_of_an_equal_salt_are_seen() -> None:
    drafter, text = SuffixDrafter(), [1, 2, 3, 4, 5, 6, 7]
    mine, other = sequence(text, 0, salt="a"), sequence([9, 3, 4, 5], 1, salt="a")
    drafter.propose(mine, 1)
    assert not drafter.propose(other, 2).token_ids
    drafter.finish(mine)
    drafter.finish(mine)
    assert drafter.propose(other, 2) == ([6, 7], 3)
    assert not drafter.propose(sequence([9, 3, 4, 5], 2, salt="b"), 2).token_ids
    assert not drafter.propose(sequence([9, 1, 2], 3, salt="a"), 2).token_ids, "a prompt is not remembered"


def test_old_outputs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MOST_TOKENS", most := 100)
    drafter = SuffixDrafter()
    for seq_id in range(4):
        seq = sequence([0, *(1000 * seq_id + i for i in range(most // 2 + 1))], seq_id)
        drafter.propose(seq, 1)
        drafter.finish(seq)
    seq = sequence([0, *(1000 * 9 + i for i in range(most + 9))], 9)
    drafter.propose(seq, 1)
    drafter.finish(seq)
    assert sum(len(index.token_ids) for index in drafter._outputs[None, None]) <= 3 * most
    assert len(drafter._outputs[None, None]) <= 2 and not drafter._own


COST = StepCost([1, 2, 4, 8], [1.0, 1.2, 1.6, 4.0], [0.001, 0.0015, 0.0025, 0.0045])


@pytest.mark.parametrize(("tokens", "more"), [(1, 0.2), (2, 0.2), (3, 0.2), (4, 0.6), (8, 0.6), (30, 0.6)])
def test_costs_are_linear_between_what_was_measured(tokens: int, more: float) -> None:
    assert COST.least_probability(tokens, 1) == pytest.approx(more / 1.0)
    assert COST.least_probability(tokens, 3) == pytest.approx(more * 3 / 1.4)


class RecordingExecutor(Executor):
    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def collect(self) -> StepResult:
        return StepResult()

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("vocab_size", "num_seqs", "most"), [(1000, 4, 32), (10, 4, 8), (1000, 1, 8), (1, 4, None)])
def test_tokens_of_measured_steps_have_different_experts(vocab_size: int, num_seqs: int, most: int | None) -> None:
    """Equal ones would have the same, and many of them cost next to nothing. There are no more than in other steps."""
    executor, drafts = RecordingExecutor(), SpeculativeConfig(method="mtp")
    config = EngineConfig(num_blocks=100, max_model_len=1000, max_num_seqs=num_seqs, speculation=drafts)
    cost = measure_steps(executor, config, vocab_size)
    assert (cost.tokens[-1] if cost else None) == most
    steps = [each.token_ids for plan in executor.plans for each in plan.verifications]
    steps += [plan.decodes.token_ids for plan in executor.plans]
    assert all(len(set(token_ids)) == len(token_ids) for token_ids in steps)
    assert all(token_id < vocab_size for token_ids in steps for token_id in token_ids)


def test_a_long_cache_makes_drafts_dearer_and_steps_without_them_too() -> None:
    assert COST.least_probability(1, 1, 0, cached=1000) == pytest.approx((0.2 + 0.5) / (1.0 + 1.0))
    assert COST.least_probability(4, 2, 3, cached=1000) == pytest.approx((0.6 + 0.5) * 2 / (1.2 + 2.0))


def speculation(cost: StepCost | None) -> Speculation:
    return Speculation(SpeculativeConfig(method="ngram", prompt_lookup_min=2), EngineStats(num_blocks=1), cost)


REPEATING = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]


def test_a_token_is_drafted_as_long_as_it_pays() -> None:
    """At first half of all drafted tokens are expected to be right. One more takes a fifth of a step, then 0.6."""
    assert len(speculation(None).propose(sequence(REPEATING), 8, 1, 1)) == 8
    assert len(speculation(COST).propose(sequence(REPEATING), 8, 1, 1)) == 2
    assert not speculation(COST).propose(sequence(REPEATING), 8, 5, 5), "a step of five has no room to spare"


def test_right_drafts_make_longer_ones_and_wrong_ones_none() -> None:
    found, seq = speculation(COST), sequence(REPEATING)
    for _ in range(20):
        found.received(seq, 3, 3)
    assert len(found.propose(seq, 8, 1, 1)) == 3, "four tokens in 1.6, five in 2.2"
    for _ in range(100):
        found.received(seq, 3, 0)
    assert not found.propose(seq, 8, 1, 1)
    assert any(found.propose(seq, 8, 1, 1) for _ in range(500)), "what is known grows old"


DRAFT_MODEL = SpeculativeConfig(method="draft_model", model="a", num_speculative_tokens=4)


def by_model(drafting: float) -> Speculation:
    """A token more takes a fifth of a step, and a pass of the draft model `drafting`."""
    cost = StepCost([1, 2, 4, 8], [1.0, 1.2, 1.6, 2.4], [0.0] * 4, [drafting] * 4)
    return Speculation(DRAFT_MODEL, EngineStats(num_blocks=1), cost)


@pytest.mark.parametrize(("drafting", "count"), [(0.0, 3), (0.15, 2), (0.5, 1), (0.6, 0)])
def test_a_draft_is_ordered_as_long_as_both_models_together_pay(drafting: float, count: int) -> None:
    """At first three quarters of all tokens are expected to be right: 0.75, 0.56, 0.42, 0.32 are, if all before are.
    The last of these would take a fifth of a step, in which 0.34 tokens come with the others."""
    found = by_model(drafting)
    assert [order.num_tokens for order in found.order([sequence([1, 2, 3])])] == [count] * bool(count)


def test_sequences_share_the_passes_of_the_draft_model() -> None:
    assert not by_model(0.9).order([sequence([1, 2])])
    assert not by_model(2.4).order([sequence([1, 2], i) for i in range(4)]), "four tokens take 1.6, one more each 2.4"
    assert len(by_model(0.2).order([sequence([1, 2], i) for i in range(2)])) == 2


MEASURED = StepCost([1, 2, 4, 8, 16, 32], [1.9, 2.1, 2.3, 2.5, 2.85, 3.65], [0.0] * 6, [0.56, 0.58, 0.66, 0.79, 0.89])
"""Milliseconds of a small model with an MTP layer on a CPU."""


def overhead(*, right: bool, prompt_length: int, num_steps: int, num_seqs: int = 16) -> tuple[float, list[int]]:
    """The share of time, by the costs, that drafts take of sequences that all run from the first step on, each of which
    has as many tokens then; and how many are drafted for in each step. Of a draft, all tokens are right or none."""
    found = Speculation(SpeculativeConfig(method="mtp", num_speculative_tokens=4), EngineStats(num_blocks=1), MEASURED)
    sequences, taken, counts = [sequence([1] * prompt_length, i, prompt_length) for i in range(num_seqs)], 0.0, []
    for seq in sequences:
        seq.max_length = 1 << 16
    for _ in range(num_steps):
        orders = found.order(sequences)
        counts.append(len(orders))
        for order in orders:
            seq, tokens = sequences[order.seq_id], order.num_tokens
            taken += MEASURED.reading(seq.num_tokens - found.drafter.num_read(seq), num_seqs)
            taken += tokens * MEASURED.least_probability(num_seqs, num_seqs, by_model=True)
        for seq in sequences:
            seq.token_ids.append(1)
        found.take(orders, [[1] * order.num_tokens for order in orders], sequences)
        for order in orders:
            found.received(sequences[order.seq_id], order.num_tokens, order.num_tokens if right else 0)
    return taken / (num_seqs * num_steps), counts


@pytest.mark.parametrize("prompt_length", [20, 500, 8000])
def test_a_full_batch_is_not_slowed_by_a_draft_model_that_is_wrong(prompt_length: int) -> None:
    """It is tried now and then, unless it takes longer to read a text than its drafts may save."""
    assert overhead(right=False, prompt_length=prompt_length, num_steps=1000)[0] < 0.02


def test_a_draft_model_that_is_right_soon_drafts_for_all() -> None:
    _, counts = overhead(right=True, prompt_length=400, num_steps=20)
    assert counts[-10:] == [16] * 10


def test_no_cached_prefix_is_read_by_an_mtp_layer() -> None:
    found, seq = Speculation(SpeculativeConfig(method="mtp"), EngineStats(num_blocks=1), MEASURED), sequence([1] * 9000)
    seq.max_length = 10000
    assert not any(found.order([seq]) for _ in range(PAUSE))
    seq.metrics.num_cached_tokens = 8000
    assert any(found.order([seq]) for _ in range(PAUSE))


def test_a_draft_is_of_the_text_that_it_was_made_for() -> None:
    found, seq = by_model(0.0), sequence([1, 2, 3])
    orders = found.order([seq])
    found.take(orders, [[7, 8, 9, 10]], [seq])
    assert found.propose(seq, 3, 1, 1) == [7, 8, 9]
    seq.token_ids.append(4)  # it went on without
    assert not found.propose(seq, 3, 1, 1)
    seq.has_left = True
    found.take(orders, [[7]], [seq])
    found.finish(seq)
    assert not found.drafter._drafts


def test_drafts_end_before_the_longest_text_does() -> None:
    seq = sequence(REPEATING)
    seq.max_length = len(REPEATING) + 3
    assert len(speculation(None).propose(seq, 8, 1, 1)) == 2
    seq.max_length = len(REPEATING) + 1
    assert not speculation(None).propose(seq, 8, 1, 1)


def test_a_model_drafts_for_itself_where_a_text_is_long() -> None:
    """A pass over all weights takes as long as a step that attends nothing."""
    cost = StepCost([1, 2, 4], [1.0, 1.0, 1.0], [0.001] * 3, [1.0] * 3)
    found, seq = Speculation(SpeculativeConfig(method="self"), EngineStats(num_blocks=1), cost), sequence([1, 2, 3])
    for cached, ordered in ((100, False), (500, False), (8000, True)):
        seq.cached_length = cached
        assert any(found.order([seq]) for _ in range(PAUSE)) == ordered
    attends_all = COST.least_probability(2, 1, cached=8000, view=9000) - COST.least_probability(2, 1, cached=8000)
    assert attends_all == 0, "a model of its own is not asked"


def test_what_a_busy_machine_measures_late_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with fewer tokens takes no longer than the fastest one with more."""
    found = iter([[1.0, 9.0, 2.0, 3.0], [2.0, 4.0, 3.0, 4.0]])
    monkeypatch.setattr("kvllm.core.drafting.step_cost._fastest", lambda *_: next(found))
    config = EngineConfig(num_blocks=100, max_model_len=1001, speculation=SpeculativeConfig(method="ngram"))
    cost = measure_steps(RecordingExecutor(), config, 8)
    assert cost and cost.seconds == [1.0, 2.0, 2.0, 3.0]
    assert [each * 992 for each in cost.attention] == pytest.approx([1.0, 1.0, 1.0, 1.0])
