"""An executor that keeps account of what a compression leaves, on its own, and compares the cache with that."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvllm.compression.paged_keys import Keys
from kvllm.config import EngineConfig
from kvllm.core.executor import BlockingExecutor
from kvllm.core.policies import Standalone
from kvllm.core.protocol import CompressionJob, SequenceStart, StepPlan, StepResult
from kvllm.core.scheduler import Scheduler
from kvllm.kvcache.cache import PagedKVCache
from kvllm.worker.inline import InlineExecutor
from kvllm.worker.model_runner import ModelRunner
from tests.helpers.dense_decoder import DenseDecoder, DensePass
from tests.helpers.plans import Scheduled, scheduled_in
from tests.helpers.transformers_decoder import TransformersDecoder


@dataclass
class Text:
    """The tokens and logits of a sequence, from its start to its end or preemption; of the layers that attend all
    tokens, in the order of `Recorder.layers`.

    cached: bool `[layers, kv_heads, positions]`, true where a KV pair is cached; they lie in order of position.
    visible: bool `[layers, kv_heads, tokens, positions]`, the positions cached when a token was computed.
    logits: by position. resumed: whether some of its output was known when it started.
    """

    tokens: list[int]
    length: int
    cached: Tensor
    visible: Tensor
    resumed: bool
    logits: dict[int, Tensor] = field(default_factory=dict)
    num_windows: int = 0

    def see(self, position: int) -> None:
        """A token is computed: its KV pair is cached, and it attends what is."""
        self.cached[..., position] = True
        self.visible[..., position, :] = self.cached


@dataclass
class Event:
    """One window that was compressed.

    position: of its first entry. cached: the text's, before. copied: whether the survivors went to fresh blocks.
    queries: that it was scored with, by layer `[Hq, rows, d]`. kept: offsets, int64 `[layers, kv_heads, retain]`. Both
    are those of the layers in the first table's blocks.
    """

    seq_id: int
    text: Text
    position: int
    cached: Tensor
    copied: bool
    queries: list[Tensor | None]
    kept: Tensor


def block_table_of(runner: ModelRunner, seq_id: int) -> list[int]:
    """The first block table of a sequence, as the worker has it."""
    state = runner.states[seq_id]
    tables = runner.tables.parts[0]
    return tables.table[state.table_slot, : tables.num_blocks[state.table_slot]].tolist()


def kv_pairs_of(runner: ModelRunner, seq_id: int, part: int = 0, layers: int | None = None) -> Tensor:
    """The cache of a sequence in logical order, in the layers of a part:
    `[layers, 2, kv_heads, KV pairs, head_dim]`, a copy."""
    state, tables = runner.states[seq_id], runner.tables.parts[part]
    length = int(tables.kv_lengths([state.table_slot])[0])
    return kv_pairs_in(runner.cache, tables.table[state.table_slot].tolist(), length)[:layers]


def kv_pairs_in(cache: PagedKVCache, table: list[int], length: int) -> Tensor:
    """The first `length` KV pairs of a block table, as `kv_pairs_of`."""
    index, size = torch.arange(length), cache.shape.block_size
    return cache.data[:, :, torch.tensor(table)[index // size], :, index % size].permute(1, 2, 3, 0, 4)


class Accounts(BlockingExecutor):
    """Keeps the tokens and logits of each sequence, from its start to its end or preemption, as a text of some kind."""

    def __init__(self, inline: InlineExecutor, config: EngineConfig) -> None:
        self.inline, self.runner, self.config = inline, inline.runner, config
        self.alive: dict[int, Any] = {}
        self.suspended: dict[int, Any] = {}
        self.texts: list[Any] = []
        self.hidden: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._compute_logits, self.runner.model.logits = self.runner.model.logits, self._record_logits

    def _record_logits(self, hidden: Tensor, **options: Any) -> Tensor:
        logits = self._compute_logits(hidden, **options)
        self.hidden += hidden
        self._logits += logits.clone()
        return logits

    def close(self) -> None:
        self.inline.close()

    def _drop(self, plan: StepPlan) -> None:
        if plan.reset:
            self.alive.clear()
        for seq_id in plan.dropped_seq_ids:
            text = self.alive.pop(seq_id)
            if seq_id in plan.suspended:
                self.suspended[seq_id] = text

    def _resume(self, start: SequenceStart) -> Any:
        """The text of a sequence that comes back from the host as it was, or None."""
        if text := self.suspended.pop(start.seq_id, None):
            assert text.length == start.logical_length
            text.tokens = list(start.token_ids)
            self.alive[start.seq_id] = text
        return text

    def _add(self, seq_id: int, text: Any) -> None:
        assert seq_id not in self.alive
        self.alive[seq_id] = text
        self.texts.append(text)

    def _account(self, scheduled: list[Scheduled]) -> None:
        """Note what each row of the step saw, and the logits of those that were sampled."""
        logits = iter(self._logits)
        for item in scheduled:
            text = self.alive[item.seq_id]
            text.tokens += item.new_tokens
            for position in range(text.length, text.length + item.num_tokens):
                text.see(position)
            text.length += item.num_tokens
            if item.samples:
                text.logits[text.length - 1] = next(logits)
            for fork in item.forks:
                child = copy.deepcopy(text)
                child.logits = {text.length - 1: next(logits)}
                self._add(fork.seq_id, child)


class Recorder(Accounts):
    """Runs plans on the real worker. Checks that a compression moves the survivors bit for bit, and nothing else."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        super().__init__(InlineExecutor(runner), config)
        self.events: list[Event] = []
        self.parts = runner.compressor.parts
        self.layers = [layer for part in self.parts for layer in part.layers]
        self._selections: dict[int, list[tuple[Tensor | None, Tensor]]] = {}  # by layer: of each window
        self._held: dict[tuple[int, int], list] = {}  # by sequence and layer, of windows that are compressed later
        selector = runner.compressor.selector
        self._scored: list[tuple[int, Tensor]] = []  # of each layer that waits for a choice: its queries
        self._select, selector.select = selector.select, self._record_selection
        self._score, selector.score = selector.score, self._record_score
        self._choose, selector.choose = selector.choose, self._record_choice

    def _record_selection(self, queries: Tensor | None, keys: Keys, layers: Sequence[int], **options: Any) -> Tensor:
        kept = self._select(queries, keys, layers=layers, **options)
        for layer, of_layer in zip(layers, kept.unflatten(0, (len(layers), -1)), strict=True):
            self._selections[layer] += zip(rows_of(queries, len(of_layer)), of_layer, strict=True)
        return kept

    def _record_score(self, queries: Tensor, keys: Keys, layers: Sequence[int], **options: Any) -> Tensor:
        self._scored.append((layers[0], queries))
        return self._score(queries, keys, layers=layers, **options)

    def _record_choice(self, scores: Tensor, **options: Any) -> Tensor:
        kept = self._choose(scores, **options)
        waiting = {layer for layer, _ in self._scored}
        of_part = next(part.layers for part in self.parts if waiting.intersection(part.layers))  # chosen from in turn
        scored = [each for each in self._scored if each[0] in of_part]
        self._scored = [each for each in self._scored if each[0] not in of_part]
        for (layer, queries), of_layer in zip(scored, kept.unflatten(0, (len(scored), -1)), strict=True):
            self._selections[layer] += zip(queries, of_layer, strict=True)
        return kept

    def execute(self, plan: StepPlan) -> StepResult:
        self._logits, self._selections = [], {layer: [] for layer in self.layers}
        self._drop(plan)
        before = {seq_id: self._kv_pairs(seq_id) for seq_id in self.alive} if plan.compressions else {}
        tables = {seq_id: block_table_of(self.runner, seq_id) for seq_id in before}
        for start in plan.new_seqs:
            if start.seq_id in self.suspended:  # it has come from the host, and may be compressed at once
                before[start.seq_id] = self._kv_pairs_from_host(start)
                tables[start.seq_id] = start.tables[0].blocks
        result = self.inline.execute(plan)
        for start in plan.new_seqs:
            self._start(start)
        for number, part in enumerate(self.parts):
            for job in plan.choices:
                for layer in part.layers if job.parts[number].dropped else ():
                    held = self._held.setdefault((job.seq_id, layer), [])
                    held[job.chosen :] = [self._selections[layer].pop(0) for _ in range(job.num_choices)]
        for job in plan.compressions:
            copied = not set(job.parts[0].destinations) <= set(tables[job.seq_id])
            for number, own in enumerate(job.parts):
                if own.dropped:
                    survives = self._compress(job, number, copied)
                    before[job.seq_id][number] = surviving(before[job.seq_id][number], survives)
        assert not any(self._selections.values())
        for seq_id, entries in before.items():
            for found, expected in zip(self._kv_pairs(seq_id), entries, strict=True):
                assert torch.equal(found[..., : expected.shape[3], :], expected), f"sequence {seq_id}"
        self._account(scheduled_in(plan))
        return result

    def _kv_pairs(self, seq_id: int) -> list[Tensor]:
        return [kv_pairs_of(self.runner, seq_id, i, len(part.layers)) for i, part in enumerate(self.parts)]

    def _kv_pairs_from_host(self, start: SequenceStart) -> list[Tensor]:
        held = self.suspended[start.seq_id].cached[:, 0].sum(-1)
        lengths = [int(held[self.layers.index(part.layers[0])]) for part in self.parts]
        return [
            kv_pairs_in(self.runner.cache, table.blocks, length)[: len(part.layers)]
            for part, table, length in zip(self.parts, start.tables, lengths, strict=False)
        ]

    def _start(self, start: SequenceStart) -> None:
        if self._resume(start):
            return
        shape, size = self.runner.cache.shape, self.config.max_model_len
        hit = start.logical_length
        cached = torch.zeros(len(self.layers), shape.num_kv_heads, size, dtype=torch.bool)
        cached[..., :hit] = True
        visible = torch.zeros(len(self.layers), shape.num_kv_heads, size, size, dtype=torch.bool)
        visible[..., :hit, :] = torch.ones(size, size, dtype=torch.bool).tril()[:hit]
        resumed = len(start.token_ids) > start.prompt_length
        self._add(start.seq_id, Text(list(start.token_ids), hit, cached, visible, resumed))

    def _compress(self, job: CompressionJob, number: int, copied: bool) -> Tensor:
        """Strike the evicted entries of a part from the account -> bool `[layers, kv_heads, entries before]`, what
        survives."""
        text, compression, own = self.alive[job.seq_id], self.config.compression, job.parts[number]
        size = own.size if compression.spec.reselects else compression.policy.window_blocks * self.config.block_size
        stride = size - compression.buffer if isinstance(compression.policy, Standalone) else size
        rows = [self.layers.index(layer) for layer in self.parts[number].layers]
        cached = text.cached[rows]
        survives = torch.ones(*cached.shape[:2], int(cached[0, 0].sum()), dtype=torch.bool)
        for i in range(job.num_windows):
            layers = [self.layers[row] for row in rows]
            held = i < job.chosen
            selections = [(self._held[job.seq_id, each] if held else self._selections[each]).pop(0) for each in layers]
            kept = torch.stack([of_layer for _, of_layer in selections])
            start = own.first_block * self.config.block_size + i * stride
            chosen = torch.zeros(*kept.shape[:2], size, dtype=torch.bool).scatter(-1, kept, True)
            survives[..., start : start + size] &= chosen
            if number == 0:
                position = int(cached[0, 0].nonzero()[start])
                queries = [of_layer for of_layer, _ in selections]
                self.events.append(Event(job.seq_id, text, position, cached, copied, queries, kept))
        after = cached.clone()
        after[cached] = survives.flatten()
        text.cached[rows] = after
        text.num_windows += job.num_windows if number == 0 else 0
        return survives


def rows_of(queries: Tensor | None, count: int) -> Iterable[Tensor | None]:
    """The queries of each window, for methods that get any."""
    return [None] * count if queries is None else queries


def surviving(entries: Tensor, survives: Tensor) -> Tensor:
    """`entries` `[layers, 2, kv_heads, n, d]` where `survives` `[layers, kv_heads, n]` is set: as many in each head."""
    layers, _, heads, _, _ = entries.shape
    kept = [[entries[i, :, j, survives[i, j]] for j in range(heads)] for i in range(layers)]
    return torch.stack([torch.stack(of_layer, dim=1) for of_layer in kept])


def poison(scheduler: Scheduler, cache: PagedKVCache) -> None:
    """Write NaN wherever there is no KV pair of a running sequence, of one that loads its blocks or of the prefix
    cache."""
    size = cache.shape.block_size
    owned = torch.zeros(cache.num_blocks, size, dtype=torch.bool)
    for seq in (*scheduler.running, *scheduler.batch.loading):
        for table in seq.tables:
            index = torch.arange(seq.logical_length - table.dropped)
            owned[torch.tensor(table.blocks, dtype=torch.long)[index // size], index % size] = True
    if prefix_cache := scheduler.blocks.prefix_cache:
        owned[[prefix_cache.is_idle(block) for block in range(cache.num_blocks)]] = True
    cache.data.masked_fill_(~owned[:, None, :, None], float("nan"))


def assert_dense(decoder: DenseDecoder | TransformersDecoder, text: Text, tolerance: float = 1e-5) -> DensePass:
    """All logits that tokens were sampled from are those of dense attention over what was cached, within a part
    `tolerance` of their range."""
    dense = decoder.forward(text.tokens[: text.length], text.visible[..., : text.length, : text.length])
    found = torch.stack(list(text.logits.values())).double()
    expected = dense.logits[list(text.logits)]
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * expected.abs().max().item())
    return dense
