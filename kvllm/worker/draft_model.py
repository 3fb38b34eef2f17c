"""The draft model: what may come next by a smaller model, over a KV pool of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from kvllm.attention.base import AttentionBackend
from kvllm.config import EngineConfig
from kvllm.core.protocol import StepPlan
from kvllm.core.sequence import PENDING
from kvllm.core.tables import TableStart
from kvllm.kvcache.ops.registry import make_operations
from kvllm.models.base import Decoder
from kvllm.worker.drafter import Text
from kvllm.worker.features.base import StepFeature, WorkerParts
from kvllm.worker.forward_pass import ForwardPass, Place
from kvllm.worker.inputs import AHEAD
from kvllm.worker.last_logits import LastLogits
from kvllm.worker.sampler import Samples, sample
from kvllm.worker.state import PartTables, SequenceState
from kvllm.worker.step_batch import StepBatch, rows_of
from kvllm.worker.threads import operators_alone

NO_PLAN = StepPlan()


@dataclass
class CachedText:
    """What the pool has of a sequence. drafted: the last tokens that are computed, which were a draft: where the text
    has others, their KV pairs are overwritten. hidden: `[1, hidden_size]`, of the last token, where drafts read it."""

    state: SequenceState
    drafted: list[int] = field(default_factory=list)
    hidden: torch.Tensor | None = None


class DraftModel:
    """Drafts by the draws of the requests: with equal logits, both models choose equal tokens, at any temperature.

    A sequence whose text does not fit into what is left of the pool gets no drafts until another one ends, and one that
    is new, or had none for long, none until all of its text is computed, with at most `max_num_batched_tokens` of all
    sequences at once.

    On a GPU the tokens of a pass go into the next one without a detour, and come to the host together, unless a request
    asks for what depends on them beside the logits.

    config: with as many blocks as the pool has, in one group. bytes_per_block: memory for as many tokens as one holds.
    most: tokens of a draft. features: of its passes. reads_hidden: whether it needs the hidden states of texts.
    """

    reads_hidden: ClassVar[bool] = False

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        config: EngineConfig,
        bytes_per_block: int,
        most: int,
        features: Sequence[StepFeature] = (),
    ) -> None:
        self.model = model
        self.config = config
        self.bytes_per_block = bytes_per_block
        self.cache = backend.cache
        self.tables = PartTables.of(config)
        self.operations = make_operations(self.cache)
        worker = WorkerParts(model, config, self.operations, backend, self.tables, features=[*features])
        self.device = worker.device
        self.forward_pass = ForwardPass(worker, samples=True, ahead=max(AHEAD, most))
        self.reset()

    def reset(self) -> None:
        """Drop all sequences."""
        self._cached: dict[int, CachedText] = {}
        self._without_room: set[int] = set()
        self._free_slots = list(range(self.config.max_num_seqs))
        self._free_blocks = list(range(self.cache.num_blocks))
        self.forward_pass.clear()

    def drop(self, seq_ids: Iterable[int]) -> None:
        """Sequences end, or lose all that is cached of them. Others are ignored."""
        for seq_id in seq_ids:
            self._without_room.discard(seq_id)
            if self._release(seq_id):
                self._without_room.clear()

    def _release(self, seq_id: int) -> bool:
        """Let go of what is there of a sequence. Returns whether there was anything."""
        cached = self._cached.pop(seq_id, None)
        if cached:
            slot, tables = cached.state.table_slot, self.tables.parts[0]
            self._free_slots.append(slot)
            self._free_blocks += tables.table[slot, : tables.num_blocks[slot]].tolist()
        return cached is not None

    @torch.inference_mode()
    def draft(self, texts: Sequence[Text]) -> None:
        """Give texts their drafts."""
        if self.device.type != "cpu":
            return self._draft(texts)
        with operators_alone():
            return self._draft(texts)

    def _draft(self, texts: Sequence[Text]) -> None:
        found = [(text, cached) for text in texts if (cached := self._cached_text(text))]
        waits = self.device.type == "cpu" or any(text.row.reads_output for text, _ in found)
        steps, step = list[DraftStep](), self._read(found)
        while step:
            steps.append(step)
            step.extend()
            if waits:
                step.settle(len(steps) - 1)
            step = self._next(step, waits=waits)
        for depth, step in enumerate(steps if not waits else ()):
            step.settle(depth)
        for text, cached in found:
            cached.drafted = text.draft[:-1]
            del text.draft[text.count :]

    def _next(self, step: DraftStep, *, waits: bool) -> DraftStep | None:
        """Draft the token after that of a step, of the texts that ask for one."""
        rows = [i for i, (text, _) in enumerate(step.texts) if len(text.draft) < text.count]
        if not rows:
            return None
        texts = [step.texts[i] for i in rows]
        place = None if waits else partial(step.samples.place, rows, list(range(len(rows))))
        return _choose(self._pass(texts, [text.draft[-1:] for text, _ in texts], place), texts)

    def _cached_text(self, text: Text) -> CachedText | None:
        """What is there of a text, with blocks for its draft; None if there is no room."""
        num_tokens = len(text) + text.count - 1
        if text.seq_id in self._without_room or num_tokens > self.config.max_model_len:
            return None
        cached = self._cached.get(text.seq_id)
        if cached and text.hidden and cached.state.logical_length - len(cached.drafted) != text.hidden.begin:
            self._release(text.seq_id)  # what lies between was forgotten
            cached = None
        tables, size = self.tables.parts[0], self.config.block_size
        first = cached.state.dropped if cached else text.hidden.begin if text.hidden else 0
        missing = -(-(num_tokens - first) // size) - (int(tables.num_blocks[cached.state.table_slot]) if cached else 0)
        if missing > len(self._free_blocks):
            self._release(text.seq_id)
            self._without_room.add(text.seq_id)
            return None
        if cached is None:
            slot = self._free_slots.pop()
            self.tables.start(slot, first, [TableStart(first, [])])
            cached = self._cached[text.seq_id] = CachedText(SequenceState([], slot, self.tables, text.row))
        cached.state.sample_row = text.row
        if missing > 0:
            tables.append(cached.state.table_slot, self._free_blocks[-missing:])
            del self._free_blocks[-missing:]
        self._forget_wrong(text, cached)
        return cached

    def _forget_wrong(self, text: Text, cached: CachedText) -> None:
        """Keep of what is computed what the text begins with, less its last token, whose logits are wanted."""
        begin = cached.state.logical_length - len(cached.drafted)
        self.tables.logical[cached.state.table_slot] = begin + self._num_right(text, begin, cached.drafted)
        cached.drafted = []

    def _num_right(self, text: Text, begin: int, drafted: list[int]) -> int:
        """How many of the drafted tokens, which were computed from position `begin` on, are those of the text."""
        right = 0
        for each, token_id in zip(drafted, text.after(begin)[:-1], strict=False):
            if each != token_id:
                break
            right += 1
        return right

    def _read(self, found: list[tuple[Text, CachedText]]) -> DraftStep | None:
        """Compute what is missing of texts, the shortest first, in one pass. Drafts the first token of those of which
        nothing is missing then."""
        missing = [text.after(cached.state.logical_length) for text, cached in found]
        left, chunks, whole = self.config.max_num_batched_tokens, list[list[int]](), list[int]()
        order = sorted(range(len(found)), key=lambda i: len(missing[i]))
        for i in order:
            chunk = missing[i][:left]
            if chunk:
                if len(chunk) == len(missing[i]):
                    whole.append(len(chunks))
                chunks.append(chunk)
                left -= len(chunk)
        if not chunks:
            return None
        last = self._pass([found[i] for i in order[: len(chunks)]], chunks)
        texts = [found[i] for i in order[: len(whole)]]
        return _choose(last.rows(range(len(texts))), texts) if texts else None

    def _pass(
        self, found: list[tuple[Text, CachedText]], tokens: list[list[int]], place: Place | None = None
    ) -> LastLogits:
        """Compute the next tokens of sequences -> the logits of the last one of each. place: writes those that only the
        device knows."""
        states = [cached.state for _, cached in found]
        counts = [len(each) for each in tokens]
        table_slots, num_known = np.array([state.table_slot for state in states]), np.array(counts)
        num_decodes = len(states) if max(counts) == 1 else 0
        batch = StepBatch(states, counts, num_decodes, table_slots, 0, num_known)
        inputs, compute = self.forward_pass.prepare(NO_PLAN, batch)
        self.tables.advance(table_slots, num_known)
        inputs.write_tokens(np.concatenate(tokens))
        return compute(inputs, place)(range(len(states)))


@dataclass
class DraftStep:
    """A token more of the drafts of some texts, which a device may still be at work on."""

    texts: list[tuple[Text, CachedText]]
    samples: Samples

    def extend(self) -> None:
        """Append PENDING to each draft."""
        for text, _ in self.texts:
            text.draft.append(PENDING)
            text.row.output_token_ids.append(PENDING)

    def settle(self, depth: int) -> None:
        """Put the tokens of this step at an index of the drafts, which end before one that could not be sampled. Waits
        for the device."""
        for (text, _), token in zip(self.texts, self.samples.tokens(), strict=True):
            text.row.output_token_ids[depth - len(text.draft)] = text.draft[depth] = token.token_id
            if token.error:
                text.count = min(text.count, depth)


def _choose(last: LastLogits, texts: list[tuple[Text, CachedText]]) -> DraftStep:
    rows = rows_of([cached.state for _, cached in texts])
    rows.reported.clear()  # nobody asks for log probabilities of drafts
    return DraftStep(texts, sample(last.logits, rows, last.chosen))
