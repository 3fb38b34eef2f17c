"""How many tokens are drafted for each sequence, by how often drafts were right and what a step costs."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences

from kvllm.config import SpeculativeConfig
from kvllm.config.speculation import VIEW_FIRST, VIEW_LAST
from kvllm.core.drafting import make_drafter
from kvllm.core.drafting.model import ModelDrafter
from kvllm.core.drafting.step_cost import StepCost
from kvllm.core.protocol import DraftOrder
from kvllm.core.sequence import PENDING, Sequence
from kvllm.stats import EngineStats

BUCKETS = 8
"""Drafts are told apart by the bits of how many tokens they came after."""
FORGETS, FADES = 0.95, 0.99
"""Of the weight of what is known of drafts, what another one leaves, and a step for which none was worth a try: in the
end one is tried again."""
HORIZON = 256
"""Tokens of a sequence, from now on, whose drafts have to be worth the time in which a draft model reads its text."""
SURE, TRIES, SPENDS = 8, 64.0, 0.01
"""Until so many tokens were tried, as far as they count still, texts are read for no longer than `TRIES` tokens take in
steps without drafts, and this share of each step; then, where drafts are expected to save more."""
PAUSE = 8
"""Steps until a draft model may be asked again after one for which no draft was worth a try."""


class Rate:
    """How often tokens of drafts were right, of those that came after right ones. Later ones count more."""

    def __init__(self) -> None:
        self.right = self.tried = 0.0

    def add(self, right: int, tried: int) -> None:
        self.right = self.right * FORGETS + right
        self.tried = self.tried * FORGETS + tried

    def fade(self, steps: int = 1) -> None:
        self.right *= FADES**steps
        self.tried *= FADES**steps

    def mean(self, prior: float, weight: float) -> float:
        return (self.right + prior * weight) / (self.tried + weight)


class Speculation:
    """Drafts for sequences that decode, and what became of them.

    A token of a draft is right with the probability that those before it had, of this sequence and of others whose
    drafts came after as many tokens. It is drafted as long as that pays; without `cost`, any draft does.
    """

    def __init__(self, config: SpeculativeConfig, stats: EngineStats, cost: StepCost | None) -> None:
        self.most = config.num_speculative_tokens
        self.stats = stats
        self.cost = cost
        self.view = VIEW_FIRST + VIEW_LAST if config.method == "self" else 0
        self._reads_texts, self._skips_cached = config.has_model, config.method == "mtp"
        self._spare = TRIES
        self._step = self._looked = self._steps = 0  # of orders, the last one that was not in a pause, and since then
        self._pauses = False
        self.drafter = make_drafter(config)
        self._of_matches = [Rate() for _ in range(BUCKETS)]
        self._of_sequences: dict[int, Rate] = {}
        self._matched: dict[int, int] = {}

    @property
    def waits(self) -> bool:
        """Whether a draft follows from the last tokens at once, and not from a step that orders it."""
        return not isinstance(self.drafter, ModelDrafter)

    def pays(self, num_seqs: int) -> bool:
        """Whether a draft that is right for sure would, in a step of so many sequences."""
        return self.cost is None or self.cost.least_probability(num_seqs, max(1, num_seqs)) < 1

    def propose(self, seq: Sequence, most: int, tokens: int, num_seqs: int) -> list[int]:
        """At most `most` tokens that are worth a try after those of a sequence.

        tokens: query tokens of the step so far, and one of each sequence that follows. num_seqs: that decode in it.
        """
        most = min(most, self.most, seq.max_length - seq.num_tokens - 1)
        if most <= 0 or seq.token_ids[-1] == PENDING or (self.waits and not self.pays(num_seqs)):
            return []
        draft = self.drafter.propose(seq, most)
        if not draft.token_ids:
            return []
        self._matched[seq.seq_id] = draft.matched
        count = self._worth(seq, len(draft.token_ids), tokens, num_seqs)
        if not count:
            self._of_matches[_bucket(draft.matched)].fade()
        return draft.token_ids[:count]

    def order(self, sequences: Sequences[Sequence]) -> list[DraftOrder]:
        """What a draft model shall draft for the next step, after this one, in which these sequences get a token."""
        found: list[DraftOrder] = []
        if not isinstance(self.drafter, ModelDrafter):
            return found
        num_seqs = tokens = len(sequences)
        self._step += 1
        if not sequences or (self._pauses and self._step < self._looked + PAUSE):
            return found
        self._steps, self._looked = self._step - self._looked, self._step
        self._spare = min(TRIES, self._spare + SPENDS * num_seqs * self._steps)
        for i in range(num_seqs):
            seq = sequences[(self._step + i) % num_seqs]  # in turns: the first ones may have no room in the draft pool
            most = min(self.most, seq.max_length - seq.num_tokens - 2)
            count = self._worth(seq, most, tokens, num_seqs, by_model=True)
            if count > 0:
                found.append(DraftOrder(seq.seq_id, count))
                tokens += count
        if not found:  # once a step: a new sequence, whose whole text is to be read first, shall not be a try each
            self._of_matches[0].fade(self._steps)
        self._pauses = not found
        return found

    def take(self, orders: list[DraftOrder], drafts: list[list[int]], sequences: Iterable[Sequence]) -> None:
        """What came of orders, for those of the sequences that go on."""
        assert isinstance(self.drafter, ModelDrafter)
        going_on = {seq.seq_id: seq for seq in sequences if not seq.has_left}
        for order, token_ids in zip(orders, drafts, strict=True):
            if order.seq_id in going_on:
                self.drafter.take(going_on[order.seq_id], token_ids)

    def received(self, seq: Sequence, num_drafts: int, num_right: int) -> None:
        """So many tokens were drafted for a sequence, and the first ones were right."""
        tried = min(num_drafts, num_right + 1)
        self._of_sequences.setdefault(seq.seq_id, Rate()).add(num_right, tried)
        self._of_matches[self._bucket_of(seq)].add(num_right, tried)
        self.stats.drafts.add(num_drafts, num_right)

    def finish(self, seq: Sequence) -> None:
        """A sequence ends. Idempotent."""
        self.drafter.finish(seq)
        self._of_sequences.pop(seq.seq_id, None)
        self._matched.pop(seq.seq_id, None)

    def _worth(self, seq: Sequence, most: int, tokens: int, num_seqs: int, *, by_model: bool = False) -> int:
        """How many tokens of a sequence are worth a try, up to `most`: one more as long as it comes faster than those
        that are expected with the others. tokens: of the step without them. by_model: what drafts has yet to run."""
        rate, of_matches = self._of_sequences.setdefault(seq.seq_id, Rate()), self._of_matches[self._bucket_of(seq)]
        right = rate.mean(of_matches.mean(self.drafter.prior, 2), 2)
        count, probability, num_tokens, time = 0, right, 1.0, 1.0
        while count < most:
            least = self._least(tokens + count, num_seqs, count, seq.cached_length, by_model)
            if probability * time <= least * num_tokens:
                break
            count, num_tokens, time = count + 1, num_tokens + probability, time + least
            probability *= right
        steps = min(HORIZON, seq.max_length - seq.num_tokens) / num_tokens
        if by_model and count and not self._may_read(seq, num_seqs, (num_tokens - time) * steps):
            count = 0
        if not count and most > 0:
            rate.fade(self._steps if by_model else 1)
        return count

    def _may_read(self, seq: Sequence, num_seqs: int, gain: float) -> bool:
        """Whether a draft model may read what it has not of a text, whose drafts are expected to save `gain`."""
        assert isinstance(self.drafter, ModelDrafter)
        skipped = seq.metrics.num_cached_tokens if self._skips_cached else 0
        unread = seq.num_tokens - max(skipped, self.drafter.num_read(seq))
        if not (self._reads_texts and self.cost) or unread <= 1 + self.most:
            return True
        time, is_sure = self.cost.reading(unread, num_seqs), self._of_matches[0].tried >= SURE
        if time > (gain if is_sure else self._spare):
            return False
        self._spare -= 0.0 if is_sure else time
        return True

    def _least(self, tokens: int, num_seqs: int, draft: int, cached: int, by_model: bool) -> float:
        """See `StepCost.least_probability`."""
        if self.cost is None:
            return 0.0
        return self.cost.least_probability(tokens, num_seqs, draft, cached, by_model=by_model, view=self.view)

    def _bucket_of(self, seq: Sequence) -> int:
        return _bucket(self._matched.get(seq.seq_id, 0))


def _bucket(matched: int) -> int:
    return min(matched.bit_length(), BUCKETS - 1)
