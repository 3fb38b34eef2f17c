"""StepPlan -> StepResult on one rank: keeps the sequences' state, builds the batch, runs the model, samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from kvllm.attention.base import AttentionBackend, ScoredChunk
from kvllm.attention.context import Attention, AttentionContext, PartedAttention
from kvllm.compression.model_inputs import WithModelInputs
from kvllm.config import EngineConfig
from kvllm.core.protocol import (
    BlockCopy,
    Fork,
    SequenceStart,
    StepPlan,
    StepResult,
    TableChange,
)
from kvllm.core.sequence import PENDING
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.ops.registry import make_operations
from kvllm.kvcache.residual import KVResidual, ResidualStep
from kvllm.kvcache.tiers.dropped_pairs import DroppedPairs
from kvllm.kvcache.tiers.host import HostStore
from kvllm.sampling_params import SamplingParams
from kvllm.structured.compile import Grammars
from kvllm.worker.attention_state import AttentionMass, RaggedLengths
from kvllm.worker.compression import Compression
from kvllm.worker.draws import most_likely, reads_in_place
from kvllm.worker.graph_sizes import GraphSize, GraphSizes
from kvllm.worker.graphs import Capture, StepGraphs
from kvllm.worker.group_tables import make_tables, num_full_parts, part_of_layers, table_widths
from kvllm.worker.inputs import InputPreparer
from kvllm.worker.last_logits import LastLogits
from kvllm.worker.launched import Launched
from kvllm.worker.observed_scores import ObservedScores, ScoringBackend
from kvllm.worker.offloader import Offloader
from kvllm.worker.prompt_logprobs import PromptReport
from kvllm.worker.recalling_backend import RecallingBackend
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.sampler import Samples, sample
from kvllm.worker.state import Lengths, SequenceState
from kvllm.worker.step_batch import BatchKeeper, StepBatch, number_rows, rows_of
from kvllm.worker.step_inputs import InputShape, StepInputs
from kvllm.worker.threads import operators_alone
from kvllm.worker.timing import PhaseClock
from kvllm.worker.transfer import to_device

Run = Callable[[Callable[[], None]], Launched]
"""Starts the pass of a prepared plan, and calls what it is given right before."""

Place = Callable[[torch.Tensor], None]
"""Writes tokens that are on the device already into the token ids `[T]` of a step there."""

LastRows = Callable[[Sequence[int]], LastLogits]
"""The logits of the last tokens of some sequences, by their numbers in the step."""


class ModelRunner:
    """One model shard with its part of the KV cache.

    model: a `kvllm.models.base.Decoder`. eos_token_ids: tokens that end a text, kept from being sampled before
        `min_tokens`.
    select: called in place of the compression method, with its arguments. samples: whether tokens are sampled here.
    grammars: those of requests with structured outputs, where tokens are sampled. store: for what leaves the pool.
    dropped: room for what compressions drop, where it may come back.
    """

    def __init__(
        self,
        model: Any,
        cache: PagedKVCache,
        backend: AttentionBackend,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...] = (),
        select: WithModelInputs | None = None,
        samples: bool = True,
        grammars: Grammars | None = None,
        store: HostStore | None = None,
        dropped: DroppedPairs | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.data.device
        self.operations = make_operations(cache)
        self.block_size = config.block_size
        self.eos_token_ids = eos_token_ids
        self.samples = samples
        self.grammars = grammars
        self.states: dict[int, SequenceState] = {}
        self._last = Launched()
        self._batches = BatchKeeper()
        self._shaped: tuple[StepBatch, list[tuple[int, int]], InputShape] | None = None
        """The last batch, how often tables had changed, and the shape of its inputs."""
        self._reported: set[int] = set()  # sequences whose prompt's log probabilities are asked for and not complete
        self._prompt_reports: list[PromptReport] = []  # of the step
        self.free_slots = list(reversed(range(config.max_num_seqs)))
        self.lengths = Lengths(config.max_num_seqs)
        self._part_tables = make_tables(config, self.lengths)
        self.tables = self._part_tables.parts
        self._full_parts = num_full_parts(config)
        self._part_of = part_of_layers(config, cache.shape.num_layers)
        compression = Compression.of(model, self.operations, backend, config, self.tables, select, dropped)
        self.backend = compression.backend
        self.ragged, self.mass, self.observed = compression.ragged, compression.mass, compression.observed
        self.residual: KVResidual | None = None
        if config.kv_residual_tokens:
            self.residual = KVResidual(cache.shape, config.kv_residual_tokens, config.max_num_seqs)
        self.compressor, self.recall = compression.compressor, compression.recall
        self._recalling: RecallingBackend | None = None  # in the step
        self.graphs: StepGraphs | None = None
        self._graph_sizes = GraphSizes(config.max_num_seqs)
        if self.backend.captures_chunks:
            self._graph_sizes = GraphSizes.with_chunks(config.max_num_seqs, config.max_num_batched_tokens)
        self._graph_widths = table_widths(config, max(1, self._graph_sizes.most_chunk_tokens))
        self.offloader: Offloader | None = None
        if store:
            self.offloader = Offloader(cache, store, [state for state in self._slot_states if state])
        self.inputs = InputPreparer(
            self._part_tables, self.ragged, config.observes_attention, self.device, self.observed, self._full_parts
        )

    @torch.inference_mode()
    def use_graphs(self, capture: Capture, num_blocks: int, *, largest_alone: bool = False) -> None:
        """Record steps of every size, and replay them from now on. Where the attention backend cannot be recorded, they
        go on being launched as others are.

        num_blocks: in the pool. largest_alone: record the rest when it is needed.
        """
        if self.backend.capturable and (self.observed is None or self.backend.scores_windows):
            first, *others = self._graph_widths
            most = [
                min(num_blocks, width) if part < self._full_parts else width for part, width in enumerate(others, 1)
            ]
            sizes = self._graph_sizes
            before_replay = self._plan_again if self.backend.plans_on_host else None
            self.graphs = StepGraphs(
                self._recorded,
                capture,
                self.inputs,
                sizes,
                min(num_blocks, first),
                tuple(most),
                self._full_parts,
                before_replay,
            )
            self.graphs.capture(sizes.all()[: 1 if largest_alone else None])

    def _recorded(self, inputs: StepInputs) -> LastLogits:
        """All of a step but draws, for a graph: the logits of each sequence, and its most likely token."""
        hidden = self.model.forward(inputs.token_ids, inputs.positions, self._attention(inputs))
        logits = self._logits(hidden if inputs.shape.is_decode else hidden[inputs.query_start_loc[1:].long() - 1])
        return LastLogits(logits, most_likely(logits) if self.samples else None)

    def _plan_again(self, inputs: StepInputs) -> None:
        """The part of attention that the host has in a step whose graph is about to be replayed."""
        for batch in inputs.batches():
            self.backend.before_replay(batch)

    def _logits(self, hidden: torch.Tensor, *, plain: bool = False) -> torch.Tensor:
        """`[R, hidden_size]` -> `[R, vocab_size]`, of which every rank computes a part. plain: nothing but the largest
        of each row will be looked for."""
        return self.model.logits(hidden, rounded=plain or reads_in_place(hidden))

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan to its end."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Launched:
        """Start a plan. On a CPU it is executed when this returns."""
        if self.device.type != "cpu":
            return self.prepare(plan)(_nothing)
        with operators_alone():
            return self.prepare(plan)(_nothing)

    def follows(self, plan: StepPlan) -> bool:
        """Whether a plan can be prepared while the one that was prepared last is run, because it touches nothing that
        this one still needs."""
        return self._batches.keeps(plan) and not (self.graphs or self.offloader or self.recall)

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> Run:
        """Do what comes before the pass of a plan, and needs no token of the step before."""
        if plan.reset:
            self._reset()
        if self.offloader:
            self.offloader.begin(plan, self.states)
        for seq_id in plan.dropped_seq_ids:
            self.free_slots.append(self.states.pop(seq_id).table_slot)
            self._reported.discard(seq_id)
        if self.compressor:
            self.compressor.forget(plan.dropped_seq_ids)
        if self.recall:
            for seq_id in {*plan.dropped_seq_ids}.difference(plan.suspended).union(plan.forgotten):
                self.recall.release(seq_id)
        for start in plan.new_seqs:
            self._start(start)
        self._batches.follow(plan)
        for change in plan.restored:
            self._change_table(change)
        for start in plan.scored:
            if self.observed:
                self.observed.start(self.states[start.seq_id].table_slot, start.kv_index)
        clock, event_bytes = PhaseClock(self.device), 0
        if (plan.compressions or plan.choices) and self.compressor:
            self.compressor.compress(plan.choices, plan.compressions, self.states, clock)
            event_bytes = self.compressor.selector.event_bytes
        with clock.measure("model"):
            if plan.copies:
                self._copy_on_write(plan.copies)
            if self.offloader:
                self.offloader.load(plan)
            for change in plan.others:
                self._change_table(change)
            forward = self._prepare_forward(plan) if plan.num_seqs else None

        def run(before_pass: Callable[[], None]) -> Launched:
            with torch.inference_mode():
                with clock.measure("model"):
                    samples, batch = forward(before_pass) if forward else (None, None)
                if self.graphs and batch and not plan.has_prefill:
                    # The next step is probably one more token of each, and this one still runs.
                    self.graphs.prepare_ahead(batch.states)
                prompts, self._prompt_reports = self._prompt_reports, []
                complete = partial(self._complete, plan) if self.offloader or self.recall else None
                self._last = Launched(samples, clock, event_bytes, prompts, complete, batch)
                return self._last

        return run

    def _complete(self, plan: StepPlan, result: StepResult) -> None:
        """Add what tiers have done to the result of a plan."""
        if self.offloader:
            result.transfers = self.offloader.report(wait=not plan.num_seqs)
        if self.recall and plan.num_seqs:
            result.missing_masses = self.recall.missing_masses()
            result.recalled_bytes = self.recall.exchanged_bytes

    def _reset(self) -> None:
        """Drop all sequences, and whatever a step that was cut short has left half done."""
        if self.compressor:
            self.compressor.forget(self.states)
            self.compressor.selector.forget()
        self.states = {}
        self._reported.clear()
        self._prompt_reports = []
        self._last = Launched()
        self.free_slots = list(reversed(range(len(self.tables[0].table))))
        self.inputs.clear()
        if self.offloader:
            self.offloader.reset()
        if self.recall:
            self.recall.clear()

    def _start(self, start: SequenceStart) -> None:
        prompt, output = start.token_ids[: start.prompt_length], start.token_ids[start.prompt_length :]
        row = self._sample_row(start.sampling, start.seed, prompt, output)
        if start.sampling.prompt_logprobs is not None and not output:
            self._reported.add(start.seq_id)
        table_slot = self._acquire_slot()
        self.tables[0].append(table_slot, start.block_table)
        logical_length = start.cached_length + start.dropped
        if self.residual:
            self.residual.start(table_slot, logical_length)
        if self.offloader:
            self.offloader.restore(start.seq_id, table_slot)
        self.lengths.start(table_slot, logical_length, start.cached_length)
        self.states[start.seq_id] = SequenceState(start.token_ids, table_slot, self.lengths, row)

    def _sample_row(self, params: SamplingParams, seed: int, prompt: list[int], output: list[int]) -> SampleRow:
        rule = params.structured_outputs
        matcher = self.grammars.matcher(rule) if rule is not None and self.grammars is not None else None
        return SampleRow(params, seed, prompt, output, self.eos_token_ids, matcher)

    def _acquire_slot(self) -> int:
        table_slot = self.free_slots.pop()
        for table in (*self.tables, *self._slot_states):
            if table:
                table.clear(table_slot)
        return table_slot

    @property
    def _slot_states(self) -> tuple[RaggedLengths | AttentionMass | ObservedScores | KVResidual | None, ...]:
        return self.ragged, self.mass, self.observed, self.residual

    def _copy_on_write(self, copies: list[BlockCopy]) -> None:
        sources = []
        for copy in copies:
            tables, table_slot = self.tables[copy.part], self.states[copy.seq_id].table_slot
            index = copy.index - int(tables.first[table_slot])
            sources.append(int(tables.table[table_slot, index]))
            tables.replace(table_slot, index, 1, [copy.destination])
        destinations = [copy.destination for copy in copies]
        self.operations.copy_blocks(to_device(sources, self.device), to_device(destinations, self.device))

    def _change_table(self, change: TableChange) -> None:
        tables, table_slot = self.tables[change.part], self.states[change.seq_id].table_slot
        tables.slide(table_slot, change.first)
        tables.append(table_slot, change.new_blocks)

    def _prepare_forward(self, plan: StepPlan) -> Callable[[Callable[[], None]], tuple[Samples | None, StepBatch]]:
        """Prepare the model's pass. What this returns runs it and samples. On a GPU both have only been launched when
        that returns."""
        batch = self._batches.batch(plan, self.states)
        states, num_tokens = batch.states, batch.num_tokens
        if plan.decodes.grown:
            self.tables[0].append_one(batch.table_slots[plan.decodes.grown], plan.decodes.new_blocks)
        chunk_tokens: list[int] = []
        for chunk in plan.chunks:
            state = self.states[chunk.seq_id]
            self.tables[0].append(state.table_slot, chunk.new_blocks)
            begin = state.logical_length
            chunk_tokens += state.token_ids[begin : begin + chunk.num_tokens]
        if self.recall:
            groups = self.recall.groups(plan, states, self.tables[0])
            self._recalling = RecallingBackend(self.backend, self.recall, groups) if groups else None
        chunks = [self._scored_chunks(states, num_tokens, part) for part in range(self._full_parts)]
        size = self._graph_sizes.of(num_tokens) if self.graphs else None
        compute: Callable[[StepInputs, Place | None], LastRows]
        if self.graphs is None or size is None or self._reported or self._recalling or any(chunks):
            inputs = self._prepare_inputs(batch)
            # A GPU gets its inputs when the tokens are in them.
            attention = None
            if self.device.type == "cpu":
                residual = self.residual.step(batch.table_slots, inputs.positions) if self.residual else None
                attention = self._attention(inputs, chunks, residual)
            compute = partial(self._compute, plan, batch, chunks, attention)
        else:
            inputs = self.graphs.prepare(states, num_tokens, size)
            compute = partial(self._replay, self.graphs, size)
        self.lengths.advance(batch.table_slots, batch.counts)
        known = np.array(plan.decodes.token_ids, dtype=np.int64)
        pending = np.flatnonzero(known == PENDING).tolist()

        def run(before_pass: Callable[[], None]) -> tuple[Samples | None, StepBatch]:
            token_ids, place = self._extend(batch, known, pending)
            inputs.write_tokens(np.concatenate([token_ids, chunk_tokens]) if chunk_tokens else token_ids)
            before_pass()
            return self._sample(plan, batch, compute(inputs, place)), batch

        return run

    def _prepare_inputs(self, batch: StepBatch) -> StepInputs:
        """Those of a pass that is not recorded."""
        changes = [(part.num_appends, part.num_replacements) for part in self.tables]
        if self._shaped is None or self._shaped[0] is not batch or self._shaped[1] != changes:
            num_blocks = self._part_tables.num_blocks[:, batch.table_slots].max(axis=1).tolist()
            shape = self.inputs.shape(sum(batch.num_tokens), len(batch.states), *num_blocks)
            self._shaped = batch, changes, shape
        return self.inputs.prepare(batch.states, batch.num_tokens, self._shaped[2])

    def _extend(self, batch: StepBatch, known: np.ndarray, pending: list[int]) -> tuple[np.ndarray, Place | None]:
        """Give sequences that decode their new tokens. Returns these tokens, and what writes those that only the device
        knows, if there are any.

        known: int64 `[num_decodes]`, these tokens, PENDING at the indices `pending`.
        """
        token_ids, place = known, None
        if pending:
            if self.device.type == "cpu" or any(batch.states[index].sample_row.reads_output for index in pending):
                token_ids = self._last.filled(known, pending, batch)
            else:
                place = partial(self._last.place, [batch.states[index] for index in pending], pending)
        batch.extend(token_ids)
        if place:
            batch.take_tokens()  # PENDING, which the result of the step before replaces
        return token_ids, place

    def _compute(
        self,
        plan: StepPlan,
        batch: StepBatch,
        chunks: Sequence[tuple[ScoredChunk, ...]],
        attention: Attention | None,
        inputs: StepInputs,
        place: Place | None,
    ) -> LastRows:
        """The model's pass, kernel by kernel, over inputs on the host. attention: if it is known already."""
        inputs = inputs.to(self.device)
        if place:
            place(inputs.token_ids)
        attention = attention or self._attention(inputs, chunks)
        last = None if batch.only_decodes else to_device(batch.last_tokens, self.device)
        # On a GPU, a product may have other bits with another number of rows; on a CPU it has not.
        all_wanted = self.device.type != "cpu" or bool(self._reported)
        hidden = self.model.forward(inputs.token_ids, inputs.positions, attention, None if all_wanted else last)
        if self._reported:
            self._report_prompts(plan, batch.states, hidden)
        if all_wanted and last is not None:
            hidden = hidden[last]
        return partial(self._last_logits, batch, hidden)

    def _replay(self, graphs: StepGraphs, size: GraphSize, inputs: StepInputs, place: Place | None) -> LastRows:
        """The same, recorded."""
        return graphs.run(inputs, size, place).rows

    def _attention(
        self,
        inputs: StepInputs,
        chunks: Sequence[tuple[ScoredChunk, ...]] = (),
        residual: ResidualStep | None = None,
    ) -> Attention:
        """Attention over inputs on the model's device, whose tokens it does not read. chunks: those that are scored in
        each part that attends all tokens. residual: of the step; all layers are in one part."""
        batches = inputs.batches(self.observed.windows if self.observed else None, chunks, residual)
        backend = self._recalling or self.backend
        if any(chunks):
            backend = ScoringBackend(backend, self.operations)
        parts = [
            AttentionContext(backend, self.operations, backend.plan(of_part), part.slot_mapping, residual)
            for of_part, part in zip(batches, inputs.parts, strict=True)
        ]
        return parts[0] if len(parts) == 1 else PartedAttention(parts, self._part_of)

    def _scored_chunks(self, states: list[SequenceState], num_tokens: list[int], part: int) -> tuple[ScoredChunk, ...]:
        """The query tokens whose scores the attention backend does not add up, with their places in a part."""
        if self.observed is None or (self.backend.scores_windows and max(num_tokens) == 1):
            return ()
        chunks, begin = [], 0
        lengths = self.tables[part].kv_lengths([state.table_slot for state in states]).tolist()
        for i, (state, count, length) in enumerate(zip(states, num_tokens, lengths, strict=True)):
            start = int(self.observed.window_starts(state.table_slot, length - state.cached_length))
            if start < length + count and (count > 1 or not self.backend.scores_windows):
                chunks.append(ScoredChunk(i, begin, begin + count, length, start))
            begin += count
        return tuple(chunks)

    def _report_prompts(self, plan: StepPlan, states: list[SequenceState], hidden: torch.Tensor) -> None:
        """Report the tokens that follow those of the step in prompts. Lengths are those after the step."""
        begin = first_chunk = len(plan.decodes.seq_ids)
        for item, state in zip(plan.chunks, states[first_chunk:], strict=True):
            row, first = state.sample_row, state.logical_length - item.num_tokens + 1
            following = row.prompt_token_ids[first : first + item.num_tokens]
            if item.seq_id in self._reported and following:
                report = PromptReport(
                    item.seq_id,
                    first,
                    following,
                    row.params.prompt_logprobs or 0,
                    hidden[begin : begin + len(following)],
                    self.model.logits,
                    self.model.embedding.vocab_size,
                )
                if self.samples:
                    self._prompt_reports.append(report)
            if len(following) < item.num_tokens:
                self._reported.discard(item.seq_id)
            begin += item.num_tokens

    def _sample(self, plan: StepPlan, batch: StepBatch, last_logits: LastRows) -> Samples | None:
        """Sample where the plan says so; a fork samples from its parent's logits."""
        if batch.only_decodes:
            logits, chosen = last_logits(range(batch.num_decodes))
            if self._last.batch is not batch:
                number_rows(batch.decoding)
            return sample(logits, batch.decode_rows, chosen) if self.samples else None
        sampled, numbers = batch.decoding[:], list(range(batch.num_decodes))
        for number, chunk in enumerate(plan.chunks, batch.num_decodes):
            if chunk.samples:
                parent = batch.states[number]
                sampled += [parent, *[self._fork(parent, fork) for fork in chunk.forks]]
                numbers += [number] * (1 + len(chunk.forks))
        if not sampled:
            return None
        number_rows(sampled)
        logits, chosen = last_logits(numbers)
        return sample(logits, rows_of(sampled), chosen) if self.samples else None

    def _last_logits(self, batch: StepBatch, hidden: torch.Tensor, numbers: Sequence[int]) -> LastLogits:
        """Of some sequences of a batch, from the hidden states `[S, hidden_size]` of the last tokens of all."""
        if batch.only_decodes:
            return LastLogits(self._logits(hidden, plain=batch.decode_rows.is_plain))
        rows = list(numbers)
        in_order = rows == list(range(len(rows)))
        return LastLogits(self._logits(hidden[: len(rows)] if in_order else hidden[to_device(rows, self.device)]))

    def _fork(self, parent: SequenceState, fork: Fork) -> SequenceState:
        source = parent.sample_row
        row = self._sample_row(source.params, fork.seed, source.prompt_token_ids, [])
        child = SequenceState(parent.token_ids[:], self._acquire_slot(), self.lengths, row)
        self.lengths.start(child.table_slot, parent.logical_length, parent.cached_length)
        for tables in self.tables:
            tables.copy(parent.table_slot, child.table_slot)
        if self.observed:
            self.observed.restore(child.table_slot, self.observed.save(parent.table_slot))
        if self.residual:
            self.residual.copy(parent.table_slot, child.table_slot)
        if self.mass:  # the lengths of heads need no copy: forks come before any compression
            self.mass.copy(parent.table_slot, child.table_slot)
        self.states[fork.seq_id] = child
        return child


def _nothing() -> None:
    """Nobody waits for a pass to begin."""
