"""A compression event on one rank: recompute the queries that score, select, compact.

Regions of all sequences go through the model together, in passes of as many as fit the token budget, at least one. All
passes read the cache as it was before the event; the selection is applied at the end, in one movement. So neither the
order of the regions nor the size of a pass can change what survives. Without queries to recompute, layers are selected
from together: operations are as many as for one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.context import AttentionContext
from kvllm.compression.mass import Softmax
from kvllm.compression.queries import QueryTokens, window_tokens
from kvllm.compression.registry import METHODS
from kvllm.config import CompressionConfig
from kvllm.core.protocol import CompressionJob
from kvllm.kvcache.compaction import pad, region_indices
from kvllm.kvcache.ops.base import KVOperations
from kvllm.worker.attention_state import AttentionMass, RaggedLengths
from kvllm.worker.observed_scores import ObservedScores
from kvllm.worker.state import BlockTables, SequenceState
from kvllm.worker.timing import PhaseClock
from kvllm.worker.transfer import to_device

MAX_GATHERED_BYTES = 64 << 20
"""Keys and values of several layers that are gathered at once; scoring takes a few times as much."""

Gather = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Window:
    """One window of a job: `size` KV pairs from index `start` of the cache on, to be cut to `retain`."""

    state: SequenceState
    start: int
    size: int
    retain: int


class Compressor:
    """Executes the compression jobs of a plan.

    tables: of the layers that attend all tokens. layers: their indices; nothing of others is compressed.
    ragged, mass, observed: state that some methods keep beside the cache. select: called in place of the method itself.
    """

    def __init__(
        self,
        model: Any,
        operations: KVOperations,
        backend: AttentionBackend,
        tables: BlockTables,
        layers: Sequence[int],
        config: CompressionConfig,
        max_num_batched_tokens: int,
        ragged: RaggedLengths | None = None,
        mass: AttentionMass | None = None,
        observed: ObservedScores | None = None,
        select: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.model = model
        self.operations = operations
        self.cache = operations.cache
        self.backend = backend
        self.tables = tables
        self.layers = layers
        self.config = config
        self.max_num_batched_tokens = max_num_batched_tokens
        self.ragged = ragged
        self.mass = mass
        self.observed = observed
        self.select = select or METHODS[config.method]
        self.carries = config.spec.carries
        self.method = METHODS[config.method]
        self.query_tokens = QueryTokens.of(config)
        self.options = config.options
        self.block_size = self.cache.shape.block_size
        self.event_bytes = 0

    def compress(self, jobs: list[CompressionJob], states: dict[int, SequenceState], clock: PhaseClock) -> None:
        """Select and compact, then update the tables and cached lengths of the jobs' sequences.

        Leaves in `event_bytes` what StepResult reports under that name.
        """
        self.event_bytes = 0
        moving = [job for job in jobs if job.destinations]
        with clock.measure("select"):
            kept = self._select(moving, states, clock)
        with clock.measure("compact"):
            if moving:
                self._compact(moving, states, kept)
            for job in jobs:
                state = states[job.seq_id]
                self.tables.replace(state.table_slot, job.first_block, job.region_blocks, job.destinations)
                if self.observed:
                    self.observed.advance(state.table_slot, job)
                state.cached_length -= job.dropped

    # Selection

    def _select(
        self, jobs: list[CompressionJob], states: dict[int, SequenceState], clock: PhaseClock
    ) -> list[torch.Tensor]:
        """For each job the offsets that its windows keep: `[layers, windows, kv_heads, retain]`."""
        windows = [window for job in jobs for window in self._windows_of(job, states[job.seq_id])]
        kept: list[torch.Tensor] = []
        for (size, retain), group in groupby(windows, key=lambda window: (window.size, window.retain)):
            alike = list(group)
            offsets = np.array(self.query_tokens.offsets(size), dtype=np.int64)
            windows_per_pass = max(1, self.max_num_batched_tokens // window_tokens(self.config, size))
            for i in range(0, len(alike), windows_per_pass):
                kept += self._kept(alike[i : i + windows_per_pass], size, retain, offsets, clock).unbind(1)
        counts = [job.num_windows for job in jobs]
        ends = np.cumsum(counts)
        return [torch.stack(kept[end - count : end], dim=1) for count, end in zip(counts, ends.tolist(), strict=True)]

    def _windows_of(self, job: CompressionJob, state: SequenceState) -> Iterator[_Window]:
        start = job.first_block * self.block_size
        for i in range(job.num_windows):
            yield _Window(state, start + i * job.stride, job.size, job.retain)

    def _kept(
        self, windows: list[_Window], size: int, retain: int, offsets: np.ndarray, clock: PhaseClock
    ) -> torch.Tensor:
        """Offsets that survive in windows of one size: `[layers, windows, kv_heads, retain]`."""
        tables = self._window_tables(windows, size)
        shared = self._shared_inputs(windows, offsets)
        layers = self.layers
        kept: list[torch.Tensor] = []

        def select(layers: Sequence[int], queries: torch.Tensor | None) -> None:
            with clock.measure("score"):
                inputs = shared | self._inputs(windows, layers, tables, size)
                chosen = self.select(queries, retain=self._mean_retained(retain), **self.options, **inputs)
                if self.mass and self.carries:
                    self.mass.put(layers[0], *_places(windows), inputs["carried"])
                # Layers and heads may keep fewer than there is room for.
                chosen = torch.nn.functional.pad(chosen, (0, retain - chosen.shape[-1]), value=-1)
                kept.append(chosen.unflatten(0, (len(layers), len(windows))))
            tensors = (inputs["keys"], *kept, queries, inputs.get("values"))
            held = sum(tensor.nbytes for tensor in tensors if tensor is not None)
            self.event_bytes = max(self.event_bytes, held)

        def visit(layer: int, queries: torch.Tensor) -> None:
            of_windows = queries.view(len(windows), len(offsets), *queries.shape[1:]).transpose(1, 2)
            select([layer], of_windows)

        if len(offsets):
            self._recompute(windows, offsets, visit)
        else:
            at_once = self._layers_at_once(len(windows) * size)
            for first in range(0, len(layers), at_once):
                select(layers[first : first + at_once], None)
        return torch.cat(kept)

    def _layers_at_once(self, num_pairs: int) -> int:
        """Layers that are selected from in one call, for windows of so many KV pairs together."""
        if self.method.by_layer:
            return 1
        shape, kinds = self.cache.shape, 2 if "values" in self.method.arguments else 1
        layer_bytes = num_pairs * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize * kinds
        return max(1, MAX_GATHERED_BYTES // layer_bytes)

    def _mean_retained(self, retain: int) -> int:
        """KV pairs that heads keep on average, where `retain` is what they have room for."""
        if not self.ragged or self.config.budget_tokens is None:
            return retain
        return retain - (self.config.held_tokens - self.config.budget_tokens)

    def _shared_inputs(self, windows: list[_Window], offsets: np.ndarray) -> dict[str, Any]:
        """The inputs that are the same in all layers."""
        return {
            "buffer": self.config.buffer,
            "num_layers": self.cache.shape.num_layers,
            "query_offsets": to_device(offsets, self.cache.data.device),
        }

    def _inputs(self, windows: list[_Window], layers: Sequence[int], tables: torch.Tensor, size: int) -> dict[str, Any]:
        """Keys, and the inputs among `kvllm.compression.registry.INPUTS` that layers do not share: a row for each
        window in the first layer, then in the next."""
        table_slots, starts = _places(windows)
        inputs: dict[str, Any] = {
            "layers": layers,
            "layer": layers[0],
            "softmax": self._softmax(layers[0]),
            "keys": self._gather(self.operations.gather_keys, layers, tables, size),
            "seeds": [_seed(window) for window in windows] * len(layers),
            "starts": starts * len(layers),
            "last_positions": [w.start + size - 1 + w.state.dropped for w in windows] * len(layers),
        }
        if "values" in self.method.arguments:
            inputs["values"] = self._gather(self.operations.gather_values, layers, tables, size)
        if self.ragged:
            inputs["capacity"] = windows[0].retain
            inputs["evicted_mask"] = self.ragged.evicted_mask(layers[0], table_slots, starts, size)
        if self.mass:
            name = "carried" if self.carries else "mass"
            inputs[name] = self.mass.gather(layers[0], table_slots, starts, size)
        if self.observed:
            inputs["observed"] = self._gather(self.observed.of_windows, layers, tables, size - self.config.buffer)
        return inputs

    @staticmethod
    def _gather(gather: Gather, layers: Sequence[int], tables: torch.Tensor, size: int) -> torch.Tensor:
        """What `gather` finds for the first `size` KV pairs of windows in some layers: `[layers * windows, kv_heads,
        size, ...]`."""
        of_layers = [gather(layer, tables)[:, :, :size] for layer in layers]
        return of_layers[0] if len(of_layers) == 1 else torch.cat(of_layers)

    def _softmax(self, layer: int) -> Softmax:
        """The softmax of a layer's attention."""
        options = self.backend.layers[layer]
        sinks = self.model.layers[layer].attention.sinks if options.sinks else None
        return Softmax(self.backend.scale, options.soft_cap, sinks)

    def _window_tables(self, windows: list[_Window], size: int) -> torch.Tensor:
        """Block ids of the windows: int32 `[windows, blocks]`."""
        first = np.array([window.start // self.block_size for window in windows])[:, None]
        blocks = first + np.arange(-(-size // self.block_size))
        tables = self.tables.table[[window.state.table_slot for window in windows]]
        return to_device(np.take_along_axis(tables, blocks, axis=1), self.cache.data.device)

    def _recompute(self, windows: list[_Window], offsets: np.ndarray, visit: Any) -> None:
        """One pass of the model over the query tokens of all windows."""
        device = self.cache.data.device
        table_slots = [window.state.table_slot for window in windows]
        index = np.array([window.start for window in windows])[:, None] + offsets  # [windows, query tokens]
        dropped = np.array([window.state.dropped for window in windows])[:, None]
        positions = index + dropped  # a KV pair that was never compressed lies behind everything that was dropped
        token_ids = [
            w.state.token_ids[p] for w, of_window in zip(windows, positions.tolist(), strict=True) for p in of_window
        ]
        num_blocks = int(index.max()) // self.block_size + 1
        batch = AttentionBatch(
            query_start_loc=torch.arange(0, index.size + 1, len(offsets), dtype=torch.int32, device=device),
            last_kv_index=to_device(index.astype(np.int32).ravel(), device),
            block_tables=to_device(self.tables.table[table_slots, :num_blocks], device),
        )
        if self.ragged:
            batch = replace(batch, **self.ragged.of(table_slots))
        self.model.recompute_queries(
            to_device(token_ids, device),
            to_device(positions.ravel(), device),
            AttentionContext(self.backend, self.operations, self.backend.plan(batch), slot_mapping=None),
            visit,
        )

    # Movement

    def _compact(self, jobs: list[CompressionJob], states: dict[int, SequenceState], kept: list[torch.Tensor]) -> None:
        """Move the survivors of all jobs, in all layers, at once."""
        indices, sources, regions = [], [], []
        for job, of_job in zip(jobs, kept, strict=True):
            state = states[job.seq_id]
            start = job.first_block * self.block_size
            region_end = min(state.cached_length, start + job.region_blocks * self.block_size)
            tail = region_end - start - job.span
            indices.append(region_indices(of_job, job.size, job.size - job.stride, tail))
            sources.append(self.tables.table[state.table_slot, job.first_block : job.first_block + job.region_blocks])
            regions.append((state.table_slot, start, region_end, state.cached_length))
        if self.ragged:
            counts = torch.stack([(of_job[:, 0] >= 0).sum(-1) for of_job in kept], dim=1)
            table_slots, starts, *_ = zip(*regions, strict=True)
            self.ragged.set(list(table_slots), list(starts), counts, [job.retain for job in jobs])
        if self.mass:
            self.mass.compact(regions, indices)
        if self.observed:
            for job, blocks, offsets in zip(jobs, sources, indices, strict=True):
                self.observed.compact(job, blocks, offsets)
        self.operations.compact(
            pad(indices),
            self._stack(sources),
            self._stack([job.destinations for job in jobs]),
        )

    def _stack(self, regions: list[Any]) -> torch.Tensor:
        """Lists of block ids -> int64 `[S, longest]`, padded at the end by each list's last block."""
        longest = max(len(blocks) for blocks in regions)
        padded = np.array([[*blocks, *[blocks[-1]] * (longest - len(blocks))] for blocks in regions], dtype=np.int64)
        return to_device(padded, self.cache.data.device)


def _places(windows: list[_Window]) -> tuple[list[int], list[int]]:
    """Table slots of the windows' sequences, and where the windows begin."""
    return [window.state.table_slot for window in windows], [window.start for window in windows]


def _seed(window: _Window) -> int:
    """A number that depends on the sequence and the window's position alone, whatever else is in the batch."""
    position = window.start + window.state.dropped
    return (window.state.sample_row.seed ^ (position * 0x9E3779B97F4A7C15)) & (2**63 - 1)
