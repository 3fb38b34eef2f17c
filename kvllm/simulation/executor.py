"""An executor without tensors: it keeps the length of each sequence and adds up how long a machine would compute."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from msgspec import Struct

from kvllm.compression.queries import query_tokens, window_tokens
from kvllm.config import CompressionConfig, EngineConfig, require
from kvllm.core.executor import BlockingExecutor
from kvllm.core.protocol import (
    CompressionJob,
    PhaseSeconds,
    SampledToken,
    SequenceStart,
    StepPlan,
    StepResult,
    TransferReport,
)
from kvllm.kvcache.groups import block_layers, full_groups
from kvllm.kvcache.tiers.chunks import CHUNK
from kvllm.simulation.cost import CostModel, QueryBatch
from kvllm.simulation.tiers import HostLink, SimulatedRecall

TOKEN = SampledToken(0)
Window = tuple[int, int]
"""Index in the cache of a window's first KV pair, and its number of KV pairs."""


class SimulatedSeconds(Struct):
    """Time by phase. A step that decodes and prefills counts for both in part.

    transfer: of copies on the device before they go to the host, and of waiting for what comes back.
    """

    decode: float = 0.0
    prefill: float = 0.0
    recompute: float = 0.0
    score: float = 0.0
    compact: float = 0.0
    recall: float = 0.0
    transfer: float = 0.0

    @property
    def total(self) -> float:
        return self.decode + self.prefill + self.recompute + self.score + self.compact + self.recall + self.transfer


class SimulatedExecutor(BlockingExecutor):
    """Accounts for plans as `ModelRunner` and `Compressor` would execute them. Every sampled token is token 0.

    planned_ahead: whether the next plan was made while the one before it ran.
    """

    def __init__(self, cost: CostModel, config: EngineConfig, recalled_pairs: float | None = None) -> None:
        """recalled_pairs: see `simulate`."""
        self.cost = cost
        self.config = config
        self.compression = config.active_compression
        self.planned_ahead = config.async_scheduling
        self.seconds = SimulatedSeconds()
        self.layers = block_layers(config.kv_groups, cost.model.num_layers)
        groups = full_groups(config.kv_groups)
        self.parts = [len(part) or self.layers for group in groups for part in group.parts]  # layers, without a window
        ends = accumulate((len(group.parts) for group in groups), initial=0)
        self.groups = [(first, group.num_layers) for first, group in zip(ends, groups, strict=False)]  # first part
        self.windows = [window for window in cost.layers_of if window is not None and window < config.max_model_len]
        self.cached: dict[int, int] = {}  # KV pairs in the first of these parts, by sequence
        self.dropped: dict[int, list[int]] = {}  # those that compressions have dropped of each, in each such part
        self.scored = set[int]()  # sequences whose scores are added up
        self._suspended = set[int]()  # `scored` of others
        self.link, self.recall = self._tiers(recalled_pairs)

    def _tiers(self, recalled_pairs: float | None) -> tuple[HostLink | None, SimulatedRecall | None]:
        config, link, recall = self.config, None, None
        if config.num_host_blocks:
            link = HostLink(self.cost.host_seconds(self.cost.host_block_bytes(config)))
        if self.compression and self.compression.recalls:
            require(config.num_host_chunks > 0, "num_host_chunks", config.num_host_chunks, "at least 1 with recall")
            most = self.compression.recall_chunks * CHUNK
            allowed = f"between 0 and {most}, which recall_chunks={self.compression.recall_chunks} allows"
            require(0 <= (recalled_pairs or 0) <= most, "recalled_pairs", recalled_pairs, allowed)
            recall = SimulatedRecall(self.compression, config.num_host_chunks, recalled_pairs)
        return link, recall

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.reset:
            self.cached.clear()
            self.dropped.clear()
            self.scored.clear()
            self._suspended.clear()
            for tier in filter(None, (self.link, self.recall)):
                tier.clear()
        if self.link:
            self._store(self.link, plan)
        if self.recall:
            self.recall.release(plan)
        for seq_id in plan.dropped_seq_ids:
            del self.cached[seq_id], self.dropped[seq_id]
            self.scored.discard(seq_id)
        for start in plan.new_seqs:
            self._start(start)
        self.scored.update(start.seq_id for start in plan.scored)
        if (plan.compressions or plan.choices) and self.compression:
            self._compress([*plan.choices, *(job for job in plan.compressions if job.moves)], self.compression)
            for job in plan.compressions:
                self.cached[job.seq_id] -= job.parts[0].dropped
                parts = zip(self.dropped[job.seq_id], job.parts, strict=True)
                self.dropped[job.seq_id] = [before + part.dropped for before, part in parts]
        if self.link:
            for load in plan.loads:
                self.link.load(load.number, len(load.transfer.blocks), self.seconds.total)
        if plan.copies:
            self.seconds.decode += self.cost.compact(len(plan.copies) * self.config.block_size, self.layers)
        if self.recall and self.compression and (batch := self.recall.batch(plan, self.cached, self.dropped)):
            self.seconds.recall += self.cost.recall(batch, self.layers, self.compression.recall_dtype)
        before = self.seconds.decode + self.seconds.prefill
        result = StepResult([TOKEN] * self._forward(plan)) if plan.num_seqs else StepResult()
        if self.link:
            result.seconds = PhaseSeconds(model=self.seconds.decode + self.seconds.prefill - before)
            result.transfers = self._transferred(self.link, wait=not plan.num_seqs)
        return result

    def _store(self, link: HostLink, plan: StepPlan) -> None:
        """Begin what goes to the host, and keep what workers know of suspended sequences."""
        link.cancel(plan.cancelled)
        for transfer in plan.stores:
            num_blocks = len(transfer.blocks)
            copying = self.cost.compact(num_blocks * self.config.block_size, self.layers)
            self.seconds.transfer += copying
            link.store(num_blocks, self.seconds.total, copying)
        for seq_id in plan.suspended:
            if seq_id in self.scored:  # not if it came back for this step, and goes again before it began
                self._suspended.add(seq_id)
        self._suspended.difference_update(plan.forgotten)

    def _transferred(self, link: HostLink, *, wait: bool) -> TransferReport:
        if wait:
            self.seconds.transfer += link.wait(self.seconds.total)
        return link.ended(self.seconds.total, all_loads=wait)

    def _start(self, start: SequenceStart) -> None:
        dropped = [table.dropped for table in start.tables[: len(self.parts)]] or [0]
        self.dropped[start.seq_id] = dropped
        self.cached[start.seq_id] = start.logical_length - dropped[0]
        if start.seq_id in self._suspended:
            self._suspended.remove(start.seq_id)
            self.scored.add(start.seq_id)

    def close(self) -> None:
        """Nothing to release."""

    def _forward(self, plan: StepPlan) -> int:
        """The model's pass over the scheduled query tokens. Returns how many tokens it samples."""
        cached, observed = self.cached, self.scored
        prefill = QueryBatch()
        samples = decoding = len(plan.decodes.seq_ids)
        visible = scored = 0
        for seq_id in plan.decodes.seq_ids:  # nearly every token of a run passes here
            cached[seq_id] += 1
            visible += cached[seq_id]
            scored += seq_id in observed
        for item in plan.chunks:
            before = cached[item.seq_id]
            cached[item.seq_id] = before + item.num_tokens
            samples += item.samples
            if item.num_tokens == 1:
                decoding += 1
                visible += before + 1
                scored += item.seq_id in observed
            else:
                prefill.add(item.num_tokens, before)
            for fork in item.forks:
                cached[fork.seq_id] = before + item.num_tokens
                self.dropped[fork.seq_id] = self.dropped[item.seq_id]
                if item.seq_id in observed:
                    observed.add(fork.seq_id)
                samples += 1
        decode = QueryBatch(decoding, decoding, visible, visible)
        if self.windows or self.groups[1:]:
            self._attend_in_groups(plan, decode, prefill)
        ahead = self.planned_ahead
        decode_seconds, prefill_seconds = self.cost.forward(decode, prefill, samples, planned_ahead=ahead)
        self.seconds.decode += decode_seconds
        if scored and self.compression:
            complete = self.compression.regions(self.config.block_size).next_end(0, 0)
            self.seconds.decode += self.cost.observe(scored * (complete // 2), sum(self.parts))  # half in the mean
        self.seconds.prefill += prefill_seconds
        return samples

    def decode_steadily(self, seq_ids: list[int], most: int, seconds: float) -> list[float]:
        """The seconds of steps in which these sequences decode one token each, and nothing else happens: of as many as
        end within `seconds`, at most `most`. All KV groups are one, and no scores are added up."""
        count, visible = len(seq_ids), sum(self.cached[seq_id] for seq_id in seq_ids)
        steps: list[float] = []
        left = seconds
        while len(steps) < most:
            visible += count
            decode = QueryBatch(count, count, visible, visible)
            step, _ = self.cost.forward(decode, QueryBatch(), count, planned_ahead=self.planned_ahead)
            left -= step
            if left < 0:
                break
            steps.append(step)
        for seq_id in seq_ids:
            self.cached[seq_id] += len(steps)
        self.seconds.decode += sum(steps)
        return steps

    def _attend_in_groups(self, plan: StepPlan, decode: QueryBatch, prefill: QueryBatch) -> None:
        """Add what the scheduled tokens attend in KV groups after the first. In those with a window nothing is
        compressed."""
        for seq_id, num_tokens in plan.query_tokens():
            dropped = self.dropped[seq_id]
            position = self.cached[seq_id] + dropped[0] - num_tokens
            batch = decode if num_tokens == 1 else prefill
            for window in self.windows:
                batch.add_sliding(window, num_tokens, position)
            for part, layers in self.groups[1:]:
                batch.add_other(part, layers, num_tokens, position - dropped[part])

    def _compress(self, jobs: list[CompressionJob], compression: CompressionConfig) -> None:
        """Select the survivors of jobs, and move those of jobs with destinations, in each part without a window."""
        for part, layers in enumerate(self.parts):
            windows: list[Window] = []
            moved = 0
            for job, own in ((job, job.parts[part]) for job in jobs):
                if not own.dropped:
                    continue
                start = own.first_block * self.config.block_size
                indices = range(job.chosen, own.num_windows)
                windows += [(start + i * own.stride, own.size) for i in indices]
                if own.destinations:
                    dropped = self.dropped[job.seq_id]
                    cached = self.cached[job.seq_id] + dropped[0] - dropped[part]
                    moved += min(cached - start, own.region_blocks * self.config.block_size) - own.dropped
            for batch in self._passes(windows, compression):
                self._select(batch, compression, layers, recomputes=part == 0)
            if moved:
                self.seconds.compact += self.cost.compact(moved, layers)
        if self.recall:
            pairs = self.recall.take([job for job in jobs if job.moves])
            held = self.layers * pairs * self.cost.pair_bytes(compression.recall_dtype)
            self.seconds.recall += self.cost.host_seconds(held)

    def _passes(self, windows: list[Window], config: CompressionConfig) -> Iterator[list[Window]]:
        """Windows that go through the model together: as many as fit the token budget, at least one."""
        batch: list[Window] = []
        tokens = 0
        for window in windows:
            of_window = window_tokens(config, window[1])
            if batch and tokens + of_window > self.config.max_num_batched_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(window)
            tokens += of_window
        if batch:
            yield batch

    def _select(self, windows: list[Window], config: CompressionConfig, layers: int, *, recomputes: bool) -> None:
        """Score the windows' keys in so many layers, in one pass.

        recomputes: computes the windows' queries again before, which is done for all layers at once.
        """
        recomputed = QueryBatch(sequences=len(windows))
        products = keys = 0
        for start, size in windows:
            tokens = query_tokens(config, size)
            recomputed.tokens += tokens
            recomputed.visible += tokens * (start + size) - tokens * (tokens - 1) // 2  # each sees all up to its own
            recomputed.read += start + size
            products += tokens * (size - config.buffer)
            keys += size
        if recomputed.tokens and recomputes:
            self.seconds.recompute += self.cost.recompute(recomputed)
        at_once = not recomputed.tokens or bool(config.spec.scores)
        self.seconds.score += self.cost.score(products, keys, layers, at_once=at_once)
