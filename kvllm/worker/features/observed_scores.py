"""Scores of KV pairs that are added up while queries pass by, so that a compression needs no pass of the model.

A score lies beside its KV pair in the pool (`PagedKVCache.scores`), and moves with its block. Only a sequence's own
output is scored, whose blocks no other sequence scores in: what it shares with others are prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Self

import numpy as np
import torch

from kvllm.attention.base import AttentionBackend, AttentionBatch, Plan, ScoredChunk
from kvllm.compression.mass import Softmax, batched_attention_mass
from kvllm.compression.registry import MethodInputs
from kvllm.core.protocol import CompressionJob, SequenceStart, StepPlan
from kvllm.kvcache.ops.base import KVOperations
from kvllm.worker.features.base import Attend, PassAttention, Restore, StepFeature, WorkerParts
from kvllm.worker.graph_sizes import GraphSizes
from kvllm.worker.state import BlockTables, SequenceState, part_of_layers
from kvllm.worker.step_batch import StepBatch
from kvllm.worker.step_inputs import StepInputs, StepTensor, write_rows
from kvllm.worker.transfer import to_device
from kvllm.worker.windows import Move, PartWindows

NEVER = np.iinfo(np.int32).max
PRIOR = 64
"""Queries that the sum of a survivor stands for, however many it has seen, beside those of the KV pairs after what was
compressed. So what it was attended long ago counts no more than what it was attended since."""


class ObservedScores(StepFeature):
    """Which KV pairs of running sequences are scored, and their scores in a cache.

    scored_from: int32 `[num_slots]`, on the host: the first of them; NEVER for a sequence that has none.
    uncompressed: int32 `[num_slots]`, on the host: the first KV pair after all survivors, which are chosen from again.
    tables: of the first parts, those whose layers attend all tokens. part_of: the part of each layer.
    recorded_rows: most query tokens of sequences that decode or have drafts, in a recorded pass; 0: none has a draft.
    """

    def __init__(
        self,
        operations: KVOperations,
        backend: AttentionBackend,
        tables: Sequence[BlockTables],
        buffer: int,
        num_slots: int,
        part_of: Sequence[int],
        recorded_rows: int = 0,
    ) -> None:
        assert operations.cache.scores is not None
        self.operations = operations
        self.backend = backend
        self.tables = tables
        self.part_of = part_of
        self._of_graphs = HeldQueries(recorded_rows) if recorded_rows else None
        self._drafted: DraftedChunks | None = None
        self.tensors = (StepTensor("scored_from", padding=NEVER, parts=len(tables)),)
        self.captures = backend.adds_scores
        self.scores = operations.cache.scores
        self.block_size = operations.cache.shape.block_size
        self.num_unscored = buffer
        self.scored_from = np.full(num_slots, NEVER, dtype=np.int32)
        self.uncompressed = np.full(num_slots, NEVER, dtype=np.int32)

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        config, compression = worker.config, worker.config.active_compression
        if compression is None or not compression.spec.reselects:
            return None
        tables = worker.tables.parts[: worker.tables.full_parts]
        part_of = part_of_layers(config, worker.shape.num_layers)
        graphs = GraphSizes.with_chunks(config.max_num_seqs, config.max_num_batched_tokens, 1 + config.most_drafts)
        rows = graphs.num_logits(graphs.all()[0]) if config.most_drafts else 0
        return cls(worker.operations, worker.backend, tables, compression.buffer, config.max_num_seqs, part_of, rows)

    def start(self, table_slot: int, start: SequenceStart) -> None:
        self.scored_from[table_slot] = NEVER

    def before_compression(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        for start in plan.scored:
            self.observe(states[start.seq_id].table_slot, start.kv_index)

    def observe(self, table_slot: int, kv_index: int) -> None:
        """KV pairs from `kv_index` on are scored."""
        self.scored_from[table_slot] = self.uncompressed[table_slot] = kv_index

    def save(self, table_slot: int) -> Restore:
        """Of where a sequence's scores begin. These move with its blocks."""
        scored_from, uncompressed = self.scored_from[table_slot], self.uncompressed[table_slot]

        def restore(table_slot: int) -> None:
            self.scored_from[table_slot], self.uncompressed[table_slot] = scored_from, uncompressed

        return restore

    def ages(self, state: SequenceState, kv_length: int, size: int) -> np.ndarray:
        """Queries whose attention to each of a sequence's first `size` scored KV pairs is added up: float32 `[size]`.

        kv_length: KV pairs of the sequence in a part. What no compression has covered is at the end of it in all parts.
        """
        index = np.arange(size) + self.scored_from[state.table_slot]
        uncovered = state.cached_length - self.uncompressed[state.table_slot]
        is_survivor = index < kv_length - uncovered
        return np.where(is_survivor, PRIOR + uncovered, kv_length - index).astype(np.float32)

    def method_inputs(self, layers: Sequence[int], windows: PartWindows) -> MethodInputs:
        num_scored = windows.size - self.num_unscored
        kv_lengths = windows.part.tables.kv_lengths(windows.table_slots).tolist()
        pairs = zip(windows.windows, kv_lengths, strict=True)
        ages = np.stack([self.ages(window.state, length, windows.size) for window, length in pairs])
        return {
            "observed": self.operations.gather_scores(layers, windows.tables, num_scored),
            "ages": to_device(ages, self.scores.device).repeat(len(layers), 1),
        }

    def compacted(self, job: CompressionJob, state: SequenceState) -> None:
        first = job.parts[0]
        end = first.first_block * self.block_size + first.num_windows * first.stride - first.dropped
        self.uncompressed[state.table_slot] = end

    def move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._move(move)

    def _move(self, move: Move) -> None:
        """Let scores move with the KV pairs of a job. Those of survivors become sums of as many queries."""
        job, offsets = move.job, move.kept
        device = self.scores.device
        index = torch.arange(offsets.shape[-1], device=device)
        source, destination = to_device(move.blocks.astype(np.int64), device), to_device(job.destinations, device)
        layer = torch.arange(offsets.shape[0], device=device)[:, None, None]
        head = torch.arange(offsets.shape[1], device=device)[:, None]
        moved = self.scores[layer, source[offsets // self.block_size], head, offsets % self.block_size]
        ages = to_device(self.ages(move.state, move.cached, job.size), device)
        later = move.cached - job.first_block * self.block_size - job.size
        moved[..., : job.retain] *= (PRIOR + later) / ages[offsets[..., : job.retain]]
        self.scores[layer, destination[index // self.block_size], head, index % self.block_size] = moved

    def write(self, inputs: StepInputs, table_slots: np.ndarray, kv_lengths: np.ndarray, *, is_new: bool) -> None:
        starts = np.broadcast_to(self.scored_from[table_slots], (len(self.tables), len(table_slots)))
        write_rows(inputs.array("scored_from"), starts, padding=NEVER)

    def attend(self, attention: PassAttention) -> None:
        inputs = attention.inputs
        if not (inputs.shape.is_decode and self.backend.adds_scores):
            scorer = ChunkScorer(self.operations)
            attention.backend = ScoringBackend(attention.backend, scorer, self._held(inputs))

    def _held(self, inputs: StepInputs) -> HeldQueries | None:
        """What gets the queries of a pass, if drafts may be among them."""
        if inputs.recordings[0]:
            return self._of_graphs
        if self._drafted:
            self._drafted.queries = HeldQueries(self._drafted.end)
        return self._drafted and self._drafted.queries

    def before_pass(self, plan: StepPlan, batch: StepBatch) -> Attend | None:
        """Query tokens whose scores the attention backend does not add up get them in another way."""
        self._drafted = None
        if self.backend.adds_scores and max(batch.num_tokens) == 1:
            return None
        chunks = [self._chunks(batch, tables) for tables in self.tables]
        known = [tuple(chunk for chunk in of_part if not batch.has_draft(chunk.sequence)) for of_part in chunks]
        drafted = [[chunk for chunk in of_part if batch.has_draft(chunk.sequence)] for of_part in chunks]
        if any(drafted):
            self._drafted = DraftedChunks(drafted, batch.table_slots.tolist(), self._of_graphs)
        return partial(_score, known) if any(known) else None

    def accepted(self, states: Sequence[SequenceState], counts: Sequence[int]) -> None:
        """Add the scores of queries that have turned out to be the sequences'."""
        if self._drafted is None or self._drafted.queries is None:
            return
        scorer = ChunkScorer(self.operations)
        num_queries = {state.table_slot: 1 + count for state, count in zip(states, counts, strict=True)}
        for part, tables in enumerate(self.tables):
            block_tables = to_device(tables.table[self._drafted.table_slots], self.scores.device)
            found = scorer.prepare(self._drafted.right(part, num_queries), block_tables)
            for layer, (queries, softmax) in self._drafted.queries.of_layers.items():
                if self.part_of[layer] == part:
                    for chunks in found:
                        scorer.add(layer, queries, softmax, chunks)
        self._drafted = None

    def _chunks(self, batch: StepBatch, tables: BlockTables) -> tuple[ScoredChunk, ...]:
        """Of one part."""
        chunks, begin = [], 0
        lengths = tables.kv_lengths(batch.table_slots).tolist()
        for i, (state, count, length) in enumerate(zip(batch.states, batch.num_tokens, lengths, strict=True)):
            start = int(self.scored_from[state.table_slot])
            if start < length + count and (count > 1 or not self.backend.adds_scores):
                chunks.append(ScoredChunk(i, begin, begin + count, length, start))
            begin += count
        return tuple(chunks)


def _score(chunks: list[tuple[ScoredChunk, ...]], attention: PassAttention) -> None:
    """chunks: of each part."""
    for fields, of_part in zip(attention.fields, chunks, strict=False):
        fields["scored_chunks"] = of_part


@dataclass(frozen=True)
class ScoredChunks:
    """Chunks C of a pass that are alike: as many query tokens T, as far from the first of as many scored keys K.

    rows: int64 `[C * T]`, of the batch's query tokens. tables: int32 `[C, n]`, blocks from the first key's on.
    last_kv_index: int64 `[T]`, the key up to which each token attends.
    blocks, slots: int64 `[C, K]`, where the scores of the keys are. num_seen: keys that have a score already.
    """

    rows: torch.Tensor
    tables: torch.Tensor
    last_kv_index: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor
    num_seen: int


class HeldQueries:
    """The first queries of a pass: those of sequences that decode, and after them of sequences with drafts.

    of_layers: by layer, memory for `num_rows` of them, `[num_rows, query_heads, head_dim]`, and the softmax.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.of_layers: dict[int, tuple[torch.Tensor, Softmax]] = {}

    def hold(self, layer: int, queries: torch.Tensor, softmax: Softmax) -> None:
        """queries: of all sequences of the pass."""
        if layer not in self.of_layers:
            self.of_layers[layer] = queries.new_empty(self.num_rows, *queries.shape[1:]), softmax
        rows = queries[: self.num_rows]
        self.of_layers[layer][0][: len(rows)] = rows


@dataclass
class DraftedChunks:
    """Sequences with drafts in a pass. Their scores are added up when it is known which of their queries are right.

    of_parts: of each part, those that are scored. table_slots: of all sequences of the pass. queries: of the pass.
    """

    of_parts: list[list[ScoredChunk]]
    table_slots: list[int]
    queries: HeldQueries | None

    @property
    def end(self) -> int:
        """Query tokens of the pass up to the last one that is scored."""
        return max(chunk.end for of_part in self.of_parts for chunk in of_part)

    def right(self, part: int, num_queries: Mapping[int, int]) -> list[ScoredChunk]:
        """What is to be scored, if so many queries of the sequences in some slots are right, and none of others."""
        counts = [num_queries.get(self.table_slots[chunk.sequence], 0) for chunk in self.of_parts[part]]
        pairs = zip(self.of_parts[part], counts, strict=True)
        return [replace(chunk, end=chunk.begin + count) for chunk, count in pairs if count]


class ChunkScorer:
    """Adds up scores of KV pairs by a second product of queries and keys."""

    def __init__(self, operations: KVOperations) -> None:
        self.operations = operations
        self.cache = operations.cache

    def prepare(self, chunks: Iterable[ScoredChunk], block_tables: torch.Tensor) -> list[ScoredChunks]:
        """Chunks that are alike are scored at once: there are many with drafts.

        block_tables: int32 `[S, n]`.
        """
        alike: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for chunk in chunks:
            skipped = max(0, chunk.scored_from - chunk.kv_index)
            if (num_tokens := chunk.end - chunk.begin - skipped) > 0:
                key = num_tokens, chunk.kv_index + skipped - chunk.scored_from
                alike.setdefault(key, []).append((chunk.sequence, chunk.scored_from, chunk.begin + skipped))
        return [self._alike(block_tables, *key, each) for key, each in alike.items()]

    def _alike(
        self, block_tables: torch.Tensor, num_tokens: int, num_seen: int, chunks: list[tuple[int, int, int]]
    ) -> ScoredChunks:
        """chunks: the sequence of each, its first scored KV pair, and the row of its first query token."""
        device, block_size, num_keys = block_tables.device, self.cache.shape.block_size, num_seen + num_tokens
        sequences, starts, rows = to_device(chunks, device, torch.int64).view(-1, 3, 1).unbind(1)
        keys, tokens = torch.arange(num_keys, device=device), torch.arange(num_tokens, device=device)
        tables = block_tables[sequences, starts // block_size + torch.arange(-(-num_keys // block_size), device=device)]
        return ScoredChunks(
            (rows + tokens).flatten(),
            tables,
            num_seen + tokens,
            tables[:, keys // block_size].long(),
            (keys % block_size).expand(len(chunks), -1),
            num_seen,
        )

    def add(self, layer: int, queries: torch.Tensor, softmax: Softmax, chunks: ScoredChunks) -> None:
        """Add what chunks give their keys, of which no other has one. queries: `[T, query_heads, head_dim]`."""
        assert self.cache.scores is not None
        num_chunks, num_keys = chunks.blocks.shape
        mass = batched_attention_mass(
            queries[chunks.rows].unflatten(0, (num_chunks, -1)).transpose(1, 2),
            self.operations.gather_keys([layer], chunks.tables, num_keys),
            num_keys,
            chunks.last_kv_index,
            squared=True,
            softmax=softmax,
        ).transpose(1, 2)
        scores, seen = self.cache.scores[self.cache.place(layer)], chunks.num_seen
        mass[:, :seen] += scores[chunks.blocks[:, :seen], :, chunks.slots[:, :seen]]
        scores[chunks.blocks, :, chunks.slots] = mass


class ScoringBackend(AttentionBackend[tuple[Plan, list[ScoredChunks]]], Generic[Plan]):
    """A backend, and the scores of sequences that it leaves to others. held: gets the queries of a pass with drafts."""

    name = "scoring"

    def __init__(self, backend: AttentionBackend[Plan], scorer: ChunkScorer, held: HeldQueries | None) -> None:
        super().__init__(backend.cache, backend.num_query_heads, backend.scale, backend.layers)
        self.backend = backend
        self.scorer = scorer
        self.held = held

    def plan(self, batch: AttentionBatch) -> tuple[Plan, list[ScoredChunks]]:
        return self.backend.plan(batch), self.scorer.prepare(batch.scored_chunks, batch.block_tables)

    def run(
        self,
        layer: int,
        queries: torch.Tensor,
        plan: tuple[Plan, list[ScoredChunks]],
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        inner, every = plan
        options = self.layers[layer]
        if options.window is None:
            softmax = Softmax(self.scale, options.soft_cap, sinks)
            for chunks in every:
                self.scorer.add(layer, queries, softmax, chunks)
            if self.held:
                self.held.hold(layer, queries, softmax)
        return self.backend.run(layer, queries, inner, sinks)
