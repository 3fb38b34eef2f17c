"""StepPlan -> StepResult on one rank: keeps the sequences' state, lets the model compute, samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np
import torch

from kvllm.attention.base import AttentionBackend
from kvllm.compression.model_inputs import WithModelInputs
from kvllm.config import EngineConfig
from kvllm.core.protocol import Accepted, BlockCopy, Fork, SampledToken, SequenceStart, StepPlan, StepResult
from kvllm.core.sequence import PENDING
from kvllm.kvcache.ops.registry import make_operations
from kvllm.kvcache.tiers.host import HostStore
from kvllm.models.base import Decoder
from kvllm.sampling_params import SamplingParams
from kvllm.structured.compile import Grammars
from kvllm.worker.compressor import Compressor
from kvllm.worker.draft_model import DraftModel
from kvllm.worker.features import add_features
from kvllm.worker.features.base import StepFeature, WorkerParts
from kvllm.worker.forward_pass import ForwardPass, LastRows, Place
from kvllm.worker.graphs import Capture
from kvllm.worker.last_logits import LastLogits
from kvllm.worker.launched import Launched
from kvllm.worker.loaded_adapters import LoadedAdapters
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.sampler import SampleRows, Samples, sample
from kvllm.worker.self_model import SelfModel
from kvllm.worker.state import PartTables, SequenceState
from kvllm.worker.step_batch import BatchKeeper, StepBatch, number_rows, rows_of
from kvllm.worker.threads import operators_alone
from kvllm.worker.timing import PhaseClock
from kvllm.worker.transfer import to_device
from kvllm.worker.verification import verify

Run = Callable[[Callable[[], None]], Launched]
"""Starts the pass of a prepared plan, and calls what it is given right before."""


class ModelRunner:
    """One model shard with its part of the KV cache.

    eos_token_ids: tokens that end a text, kept from being sampled before `min_tokens`.
    select: called in place of the compression method, with its arguments. samples: whether tokens are sampled here.
    grammars: those of requests with structured outputs, where tokens are sampled. store: for what leaves the pool.
    draft: the model that drafts, where tokens are sampled. adapters: of `model`, if it takes any. kernel_warning: of
    kernels that are slower here than they should be.
    """

    kernel_warning: str | None = None

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...] = (),
        select: WithModelInputs | None = None,
        samples: bool = True,
        grammars: Grammars | None = None,
        store: HostStore | None = None,
        draft: DraftModel | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self.model = model
        self.backend = backend
        self.cache = backend.cache
        self.device = self.cache.data.device
        self.store = store
        self.adapters = adapters
        self.operations = make_operations(self.cache)
        self.block_size = config.block_size
        self.eos_token_ids = eos_token_ids
        self.samples = samples
        self.grammars = grammars
        self.states: dict[int, SequenceState] = {}
        self.free_slots = list(reversed(range(config.max_num_seqs)))
        self.tables = PartTables.of(config)
        if config.num_draft_blocks:
            draft = SelfModel(model, backend, config, adapters)
        worker = WorkerParts(model, config, self.operations, backend, self.tables, store, draft, adapters)
        add_features(worker)
        self.features = worker.features
        self.compressor = Compressor(worker, select) if config.active_compression else None
        self.forward_pass = ForwardPass(worker, samples=samples)
        self.recorded = [self.forward_pass, *([draft.forward_pass] if draft else [])]
        """Passes that graphs may hold."""
        self._overlaps = all(feature.overlaps for feature in self.features)
        self._shares_tokens = config.async_scheduling and not self.forward_pass.parts.is_whole
        self._last = Launched()
        self._batches = BatchKeeper()
        self.bytes_per_block = self.cache.shape.bytes_per_block + (draft.bytes_per_block if draft else 0)

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
        return self._batches.keeps(plan) and self._overlaps and not self.forward_pass.graphs

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> Run:
        """Do what comes before the pass of a plan, and needs no token of the step before."""
        if plan.reset:
            self._reset()
        if plan.accepted:
            self._accept(plan.accepted)
        for feature in self.features:
            feature.before_plan(plan, self.states)
        for seq_id in plan.dropped_seq_ids:
            self.free_slots.append(self.states.pop(seq_id).table_slot)
            self.forward_pass.reports.pending.discard(seq_id)
        for start in plan.new_seqs:
            self._start(start)
        self._batches.follow(plan)
        for feature in self.features:
            feature.before_compression(plan, self.states)
        clock, event_bytes = PhaseClock(self.device), 0
        if (plan.compressions or plan.choices) and self.compressor:
            self.compressor.compress(plan.choices, plan.compressions, self.states, clock)
            event_bytes = self.compressor.selector.event_bytes
        with clock.measure("model"):
            if plan.copies:
                self._copy_on_write(plan.copies)
            for feature in self.features:
                feature.after_compression(plan)
            forward = self._prepare_forward(plan) if plan.num_seqs else None

        def run(before_pass: Callable[[], None]) -> Launched:
            with torch.inference_mode():
                with clock.measure("model"):
                    sampled, batch = forward(before_pass) if forward else (NOTHING, None)
                if self.forward_pass.graphs and batch and not (plan.has_prefill or plan.verifications):
                    # The next step is probably one more token of each, and this one still runs.
                    self.forward_pass.graphs.prepare_ahead(batch.states)
                prompts = self.forward_pass.reports.take()
                reporting = [feature for feature in self.features if feature.reports(plan)]
                complete = partial(self._complete, reporting, plan) if reporting else None
                self._last = Launched(*sampled, clock, event_bytes, prompts, complete, batch)
                return self._last

        return run

    def use_graphs(self, capture: Capture, num_blocks: int) -> None:
        """Record passes and replay them from now on, where that can be done. num_blocks: in the pool."""
        for forward_pass in self.recorded:
            forward_pass.use_graphs(capture, num_blocks)

    @staticmethod
    def _complete(reporting: list[StepFeature], plan: StepPlan, result: StepResult) -> None:
        for feature in reporting:
            feature.after_pass(plan, result)

    # Sequences

    def _accept(self, accepted: list[Accepted]) -> None:
        """Count the right tokens of drafts in the step before, which are computed."""
        states, counts = [self.states[each.seq_id] for each in accepted], [len(each.token_ids) for each in accepted]
        for feature in self.features:
            feature.accepted(states, counts)
        for state, each in zip(states, accepted, strict=True):
            state.extend(each.token_ids)
        self.tables.advance(np.array([state.table_slot for state in states]), np.array(counts))

    def _reset(self) -> None:
        """Drop all sequences, and whatever a step that was cut short has left half done."""
        self.states = {}
        self._last = Launched()
        self.free_slots = list(reversed(range(len(self.tables.logical))))
        self.forward_pass.clear()
        for feature in self.features:
            feature.reset()

    def _start(self, start: SequenceStart) -> None:
        prompt, output = start.token_ids[: start.prompt_length], start.token_ids[start.prompt_length :]
        row = self._sample_row(start.sampling, start.seed, prompt, output)
        self.forward_pass.reports.start(start)
        table_slot = self.free_slots.pop()
        self.tables.start(table_slot, start.logical_length, start.tables)
        for feature in self.features:
            feature.start(table_slot, start)
        self.states[start.seq_id] = SequenceState(start.token_ids, table_slot, self.tables, row)

    def _fork(self, parent: SequenceState, fork: Fork) -> SequenceState:
        source = parent.sample_row
        row = self._sample_row(source.params, fork.seed, source.prompt_token_ids, [])
        child = SequenceState(parent.token_ids[:], self.free_slots.pop(), self.tables, row)
        self.tables.fork(parent.table_slot, child.table_slot)
        for feature in self.features:
            feature.fork(parent.table_slot, child.table_slot)
        self.states[fork.seq_id] = child
        return child

    def _sample_row(self, params: SamplingParams, seed: int, prompt: list[int], output: list[int]) -> SampleRow:
        rule = params.structured_outputs
        matcher = self.grammars.matcher(rule) if rule is not None and self.grammars is not None else None
        return SampleRow(params, seed, prompt, output, self.eos_token_ids, matcher)

    def _copy_on_write(self, copies: list[BlockCopy]) -> None:
        sources = []
        for copy in copies:
            tables, table_slot = self.tables.parts[copy.part], self.states[copy.seq_id].table_slot
            sources.append(int(tables.table[table_slot, copy.index]))
            tables.replace(table_slot, copy.index, 1, [copy.destination])
        destinations = [copy.destination for copy in copies]
        self.operations.copy_blocks(to_device(sources, self.device), to_device(destinations, self.device))

    # The pass

    def _prepare_forward(self, plan: StepPlan) -> Callable[[Callable[[], None]], tuple[Sampled, StepBatch]]:
        """Prepare the model's pass. What this returns runs it and samples. On a GPU both have only been launched when
        that returns."""
        batch = self._batches.batch(plan, self.states)
        for tables, grown, blocks in zip(self.tables.parts, plan.decodes.grown, plan.decodes.new_blocks, strict=False):
            if grown:
                tables.append_one(batch.table_slots[grown], blocks)
        chunk_tokens: list[int] = []
        for state, verification in zip(batch.verified, plan.verifications, strict=True):
            for tables, blocks in zip(self.tables.parts, verification.new_blocks, strict=False):
                tables.append(state.table_slot, blocks)
            state.extend(verification.token_ids[:1])
            chunk_tokens += verification.token_ids
        for chunk in plan.chunks:
            state = self.states[chunk.seq_id]
            for tables, blocks in zip(self.tables.parts, chunk.new_blocks, strict=False):
                tables.append(state.table_slot, blocks)
            begin = state.logical_length
            chunk_tokens += state.token_ids[begin : begin + chunk.num_tokens]
        inputs, compute = self.forward_pass.prepare(plan, batch)
        self.tables.advance(batch.table_slots, batch.num_known)
        known = np.array(plan.decodes.token_ids, dtype=np.int64)
        pending = np.flatnonzero(known == PENDING).tolist()

        def run(before_pass: Callable[[], None]) -> tuple[Sampled, StepBatch]:
            token_ids, place = self._extend(batch, known, pending)
            inputs.write_tokens(np.concatenate([token_ids, chunk_tokens]) if chunk_tokens else token_ids)
            before_pass()
            return self._sample(plan, batch, compute(inputs, place)), batch

        return run

    def _extend(self, batch: StepBatch, known: np.ndarray, pending: list[int]) -> tuple[np.ndarray, Place | None]:
        """Give sequences that decode their new tokens. Returns these tokens, and what writes those that only the device
        knows, if there are any.

        known: int64 `[num_decodes]`, these tokens, PENDING at the indices `pending`.
        """
        token_ids, place = known, None
        if pending:
            known_here = self.device.type == "cpu" or self._last.has_result
            if known_here or any(batch.states[index].sample_row.reads_output for index in pending):
                token_ids = self._last.filled(known, pending, batch)
            else:
                place = partial(self._last.place, [batch.states[index] for index in pending], pending)
        batch.extend(token_ids)
        if place:
            batch.take_tokens()  # PENDING, which the result of the step before replaces
        return token_ids, place

    def _sample(self, plan: StepPlan, batch: StepBatch, last_logits: LastRows) -> Sampled:
        """Sample where the plan says so; a fork samples from its parent's logits."""
        if batch.only_decodes:
            last = last_logits(range(batch.num_decodes))
            if self._last.batch is not batch:
                number_rows(batch.decoding)
            return Sampled(self._draw(last, batch.decode_rows))
        sampled, rows = batch.decoding[:], list(range(batch.num_decodes))
        drafted = range(batch.num_decodes, sum(batch.num_rows) - len(plan.chunks))
        parents = batch.states[batch.num_decodes + batch.num_verified :]
        for row, parent, chunk in zip(count(drafted.stop), parents, plan.chunks, strict=False):
            if chunk.samples:
                sampled += [parent, *[self._fork(parent, fork) for fork in chunk.forks]]
                rows += [row] * (1 + len(chunk.forks))
        if not sampled and not drafted:
            return NOTHING
        number_rows(sampled)
        last, of_drafts = last_logits([*rows, *drafted]).split(len(rows))
        samples = self._draw(last, rows_of(sampled)) if sampled else None
        if not drafted:
            return Sampled(samples)
        of_sequences = rows_of(batch.verified)
        read = () if of_sequences.is_plain else range(len(drafted))
        logits = self.forward_pass.parts.gather(of_drafts.logits, read)
        if not self.samples:
            return Sampled(samples)
        drafts = [verification.token_ids[1:] for verification in plan.verifications]
        return Sampled(samples, verify(logits, of_sequences, drafts, of_drafts.chosen))

    def _draw(self, last: LastLogits, of_step: SampleRows) -> Samples | None:
        """A token of each row, where tokens are sampled. Where steps are planned ahead, all ranks get them."""
        logits = self.forward_pass.parts.gather(last.logits, of_step.read)
        samples = sample(logits, of_step, last.chosen) if self.samples else None
        if not self._shares_tokens:
            return samples
        if of_step.is_plain and last.chosen is not None:  # every rank knows them
            return samples or Samples(last.chosen.clone(), [], {}, logits.shape[-1])
        chosen = samples.chosen.clone() if samples else logits.new_zeros(len(of_step.all), dtype=torch.int64)
        chosen = self.model.lm_head.shard.all_reduce(chosen)
        return samples or Samples(chosen, [], {}, logits.shape[-1])


class Sampled(NamedTuple):
    """What a pass has sampled. verified: of each sequence with a draft, the right tokens and the one after them."""

    samples: Samples | None = None
    verified: Sequence[list[SampledToken]] = ()


NOTHING = Sampled()


def _nothing() -> None:
    """Nobody waits for a pass to begin."""
