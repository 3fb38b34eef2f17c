"""StepPlan -> StepResult on one rank: keeps the sequences' state, builds the batch, runs the model, samples."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import torch
from msgspec import structs

from kvllm.attention.backend import AttentionBackend, AttentionBatch
from kvllm.attention.cache import PagedKVCache
from kvllm.attention.compression import METHODS
from kvllm.config import EngineConfig
from kvllm.core.compression_policy import Compression
from kvllm.core.protocol import (
    BlockCopy,
    Fork,
    PhaseSeconds,
    SampledToken,
    ScheduledSequence,
    SequenceStart,
    StepPlan,
    StepResult,
)
from kvllm.worker.attention_state import AttentionMass, ObservingBackend, RaggedLengths
from kvllm.worker.compressor import Compressor
from kvllm.worker.sampler import SampleRow, sample
from kvllm.worker.state import BlockTables, SequenceState


class ModelRunner:
    """One model shard with its part of the KV cache.

    model: see `kvllm.models.llama`. eos_token_ids: tokens that end a text, kept from being sampled before `min_tokens`.
    """

    def __init__(
        self,
        model: Any,
        cache: PagedKVCache,
        backend: AttentionBackend,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.block_size = config.block_size
        self.eos_token_ids = eos_token_ids
        self.states: dict[int, SequenceState] = {}
        max_blocks = -(-config.max_model_len // config.block_size)
        self.tables = BlockTables(config.max_num_seqs, max_blocks)
        self.ragged: RaggedLengths | None = None
        self.mass: AttentionMass | None = None
        self.compressor = None
        if compression := Compression.of(config):
            self._prepare_compression(compression, config)

    def _prepare_compression(self, compression: Compression, config: EngineConfig) -> None:
        device = self.cache.data.device
        method = METHODS[compression.config.method]
        if method.ragged:
            self.ragged = RaggedLengths(self.cache.shape, config.max_num_seqs, device)
        if method.observes:
            self.mass = AttentionMass(self.cache.shape, config.max_num_seqs, config.max_model_len, device)
            self.backend = ObservingBackend(self.backend, self.mass)
        self.compressor = Compressor(
            self.model,
            self.cache,
            self.backend,
            self.tables,
            compression.config,
            compression.regions.overlap,
            config.max_num_batched_tokens,
            self.ragged,
            self.mass,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.forgotten:
            if state := self.states.pop(seq_id, None):  # unknown if the plan that would have started it failed
                self.tables.release(state.row)
        for start in plan.started:
            self._start(start)
        seconds, event_bytes = PhaseSeconds(), 0
        if plan.compressions and self.compressor:
            seconds = self.compressor.compress(plan.compressions, self.states)
            event_bytes = self.compressor.event_bytes
        begin = perf_counter()
        if plan.copies:
            self._copy_on_write(plan.copies)
        tokens = self._forward(plan.scheduled) if plan.scheduled else []
        return StepResult(tokens, structs.replace(seconds, model=perf_counter() - begin), event_bytes)

    def _start(self, start: SequenceStart) -> None:
        prompt, output = start.token_ids[: start.prompt_length], start.token_ids[start.prompt_length :]
        row = SampleRow(start.sampling, start.seed, prompt, output, self.eos_token_ids)
        self.states[start.seq_id] = SequenceState(
            token_ids=start.token_ids,
            row=self._acquire_row(),
            num_blocks=0,
            logical_length=start.cached_length,
            cached_length=start.cached_length,
            sample_row=row,
        )

    def _acquire_row(self) -> int:
        row = self.tables.acquire()
        for table in (self.ragged, self.mass):
            if table:
                table.clear(row)
        return row

    def _copy_on_write(self, copies: list[BlockCopy]) -> None:
        sources = []
        for copy in copies:
            state = self.states[copy.seq_id]
            sources.append(int(self.tables.table[state.row, copy.index]))
            self.tables.replace(state, copy.index, 1, [copy.destination])
        device = self.cache.data.device
        destinations = [copy.destination for copy in copies]
        self.backend.copy_blocks(torch.tensor(sources, device=device), torch.tensor(destinations, device=device))

    def _forward(self, scheduled: list[ScheduledSequence]) -> list[SampledToken]:
        states = [self.states[item.seq_id] for item in scheduled]
        for item, state in zip(scheduled, states, strict=True):
            state.extend(item.new_tokens)
            self.tables.append(state, item.new_blocks)
        num_tokens = np.array([item.num_tokens for item in scheduled])
        hidden = self._run_model(states, num_tokens)
        for item, state in zip(scheduled, states, strict=True):
            state.logical_length += item.num_tokens
            state.cached_length += item.num_tokens
        return self._sample(scheduled, states, hidden, np.cumsum(num_tokens) - 1)

    def _run_model(self, states: list[SequenceState], num_tokens: np.ndarray) -> torch.Tensor:
        """Hidden states `[T, hidden_size]` of the next `num_tokens[i]` tokens of each sequence."""
        starts = np.concatenate([[0], np.cumsum(num_tokens)])
        offset = np.arange(starts[-1]) - np.repeat(starts[:-1], num_tokens)
        logical = np.array([state.logical_length for state in states])
        cached = np.array([state.cached_length for state in states])
        rows = np.array([state.row for state in states])
        token_ids: list[int] = []
        for state, count in zip(states, num_tokens.tolist(), strict=True):
            token_ids += state.token_ids[state.logical_length : state.logical_length + count]
        index = np.repeat(cached, num_tokens) + offset
        slots = self.tables.slots(np.repeat(rows, num_tokens), index, self.block_size)
        num_blocks = max(state.num_blocks for state in states)
        device = self.cache.data.device
        plan = self.backend.plan(
            AttentionBatch(
                query_starts=torch.from_numpy(starts.astype(np.int32)).to(device),
                query_index=torch.from_numpy(index.astype(np.int32)).to(device),
                block_tables=torch.from_numpy(self.tables.table[rows, :num_blocks]).to(device),
                rows=rows.tolist() if self.mass else None,
                **(self.ragged.of(rows) if self.ragged else {}),
            )
        )
        return self.model.forward(
            torch.tensor(token_ids, device=device),
            torch.from_numpy(np.repeat(logical, num_tokens) + offset).to(device),
            torch.from_numpy(slots).to(device),
            self.backend,
            plan,
        )

    def _sample(
        self,
        scheduled: list[ScheduledSequence],
        states: list[SequenceState],
        hidden: torch.Tensor,
        last_rows: np.ndarray,
    ) -> list[SampledToken]:
        """Sample where the plan says so; a fork samples from its parent's logits."""
        logit_rows: list[int] = []
        sample_rows: list[SampleRow] = []
        for item, state, last_row in zip(scheduled, states, last_rows.tolist(), strict=True):
            if not item.samples:
                continue
            for each in (state, *[self._fork(state, fork) for fork in item.forks]):
                logit_rows.append(last_row)
                sample_rows.append(each.sample_row)
        if not sample_rows:
            return []
        return sample(self.model.logits(hidden[logit_rows]), sample_rows)

    def _fork(self, parent: SequenceState, fork: Fork) -> SequenceState:
        source = parent.sample_row
        row = SampleRow(source.params, fork.seed, source.prompt_token_ids, [], self.eos_token_ids)
        child = SequenceState(
            token_ids=parent.token_ids[:],
            row=self._acquire_row(),
            num_blocks=parent.num_blocks,
            logical_length=parent.logical_length,
            cached_length=parent.cached_length,
            sample_row=row,
        )
        self.tables.copy(parent, child.row)
        if self.mass:  # lengths need no copy: forks come before any compression
            self.mass.copy(parent.row, child.row)
        self.states[fork.seq_id] = child
        return child
