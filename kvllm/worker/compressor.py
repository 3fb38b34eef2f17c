"""A compression event on one rank: recompute the queries that score, select, compact.

Regions of all sequences go through the model together, in passes of as many as fit the token budget, at least one. All
passes read the cache as it was before the event; the selection is applied at the end, in one movement. So neither the
order of the regions nor the size of a pass can change what survives. Without queries to recompute, layers are selected
from together: operations are as many as for one layer. So is the choice from scores, where a method has these apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np
import torch

from kvllm.attention.base import AttentionBackend
from kvllm.attention.context import AttentionContext, PartedAttention
from kvllm.compression.linear_fit import LinearFit
from kvllm.compression.mass import Softmax
from kvllm.compression.model_inputs import WithModelInputs
from kvllm.compression.paged_keys import Keys, PagedKeys
from kvllm.compression.queries import QueryTokens, window_tokens
from kvllm.compression.registry import METHODS
from kvllm.config import CompressionConfig
from kvllm.core.protocol import CompressionJob
from kvllm.kvcache.compaction import pad, region_indices
from kvllm.kvcache.ops.base import KVOperations
from kvllm.worker.attention_state import AttentionMass, RaggedLengths
from kvllm.worker.observed_scores import ObservedScores
from kvllm.worker.read_batch import read_batch
from kvllm.worker.recall import Recall
from kvllm.worker.repetition import CachedPart, RepeatedText, repeat
from kvllm.worker.state import BlockTables, SequenceState
from kvllm.worker.timing import PhaseClock
from kvllm.worker.transfer import to_device

MAX_GATHERED_BYTES = 64 << 20
"""Keys and values of several layers that are gathered at once; scoring takes a few times as much."""
MAX_SCORE_BYTES = 16 << 20
"""Scores of layers that wait to be chosen from together; choosing takes a few times as much."""


@dataclass(frozen=True)
class CompressedPart:
    """The part of a KV group whose layers attend all tokens: its block tables, and its layers, as they lie in a block.

    index: among the parts of all groups.
    """

    index: int
    tables: BlockTables
    layers: Sequence[int]


@dataclass(frozen=True)
class _Window:
    """One window of a job in one part: `size` KV pairs from index `start` of the cache on, to be cut to `retain`.

    position: of the first of them in the text. learns: whether queries are computed again to learn from them.
    """

    state: SequenceState
    start: int
    size: int
    retain: int
    position: int
    learns: bool


Windows = tuple[_Window | None, ...]
"""One window in each part; None where all of it survives."""

Kept = list[torch.Tensor | None]
"""Offsets that survive, for each of some windows or jobs; None where all do."""


class Compressor:
    """Executes the compression jobs of a plan.

    parts: those of KV groups that attend all tokens; nothing of others is compressed.
    ragged, mass, observed: state that some methods keep beside the cache. select: called in place of the method itself.
    recall: holds what is dropped, where there is one part.
    """

    def __init__(
        self,
        model: Any,
        operations: KVOperations,
        backend: AttentionBackend,
        parts: Sequence[CompressedPart],
        config: CompressionConfig,
        max_num_batched_tokens: int,
        ragged: RaggedLengths | None = None,
        mass: AttentionMass | None = None,
        observed: ObservedScores | None = None,
        select: WithModelInputs | None = None,
        recall: Recall | None = None,
    ) -> None:
        self.model = model
        self.operations = operations
        self.cache = operations.cache
        self.backend = backend
        self.parts = parts
        self.part_of = {layer: number for number, part in enumerate(parts) for layer in part.layers}
        self.config = config
        self.max_num_batched_tokens = max_num_batched_tokens
        self.ragged = ragged
        self.mass = mass
        self.observed = observed
        self.recall = recall
        self.method = METHODS[config.method]
        self.select = select or self.method
        self.score: Callable[..., torch.Tensor] = (select or self.method).score
        self.choose = self.method.choose
        self.carries = config.spec.carries
        self.reads_blocks = config.spec.reads_blocks and operations.reads_blocks
        self.repeats = config.spec.repeats
        none = QueryTokens(0, 0)
        self._query_tokens = [none if self.repeats else QueryTokens.of(config, learns=each) for each in (False, True)]
        self.fits: list[LinearFit] = []
        self.forget()
        self.options = config.options
        self.block_size = self.cache.shape.block_size
        self.event_bytes = 0

    def forget(self) -> None:
        """Learn from the beginning, as every rank does when one of them begins again."""
        self.fits = [LinearFit() for _ in range(self.cache.shape.num_layers)] if self.config.spec.learns else []

    def compress(self, jobs: list[CompressionJob], states: dict[int, SequenceState], clock: PhaseClock) -> None:
        """Select and compact, then update the tables and cached lengths of the jobs' sequences.

        Leaves in `event_bytes` what StepResult reports under that name.
        """
        self.event_bytes = 0
        moving = [job for job in jobs if job.destinations]
        if self.recall:
            for job in moving:
                self.recall.before(job, self._region_blocks(self.parts[0].tables, job, states[job.seq_id]))
        with clock.measure("select"):
            kept = self._select(moving, states, clock)
        with clock.measure("compact"):
            for begin, end in self._runs(moving, states):
                for part, of_part in zip(self.parts, kept, strict=True):
                    self._compact(part, moving[begin:end], states, of_part[begin:end])
            for job in jobs:
                state = states[job.seq_id]
                for part in self.parts:
                    if own := job.of_part(part.index):
                        part.tables.compact(state.table_slot, own)
                if self.observed:
                    self.observed.advance(state.table_slot, job)
                state.lengths.cached[state.table_slot] -= job.dropped

    # Selection

    def _select(self, jobs: list[CompressionJob], states: dict[int, SequenceState], clock: PhaseClock) -> list[Kept]:
        """For each part, and there for each job, the offsets that its windows keep."""
        windows = [window for job in jobs for window in self._windows_of(job, states[job.seq_id])]
        kept: list[Kept] = [[] for _ in self.parts]
        for (size, learns), group in groupby(windows, key=_kind):
            alike = list(group)
            offsets = np.array(self._query_tokens[learns].offsets(size[0]), dtype=np.int64)
            tokens = window_tokens(self.config, size[0], learns=learns)
            windows_per_pass = max(1, self.max_num_batched_tokens // tokens)
            if self.repeats:
                windows_per_pass = 1  # they are repeated one by one
            for i in range(0, len(alike), windows_per_pass):
                of_pass = self._kept(alike[i : i + windows_per_pass], size[0], offsets, clock)
                for mine, of_part in zip(kept, of_pass, strict=True):
                    mine += of_part
        return [_by_job(of_part, jobs) for of_part in kept]

    def _windows_of(self, job: CompressionJob, state: SequenceState) -> Iterator[Windows]:
        of_parts = [job.of_part(part.index) for part in self.parts]
        begin = job.first_block * self.block_size + state.dropped
        for offset in range(0, job.num_windows * job.stride, job.stride):
            yield tuple(
                own
                and _Window(
                    state,
                    own.first_block * self.block_size + offset,
                    own.size,
                    own.retain,
                    begin + offset,
                    job.learns,
                )
                for own in of_parts
            )

    def _kept(self, windows: list[Windows], size: int, offsets: np.ndarray, clock: PhaseClock) -> list[Kept]:
        """The offsets that survive in windows of one size: for each part and window `[layers, kv_heads, retain]`."""
        of_parts = [[each for each in of_part if each] for of_part in zip(*windows, strict=True)]
        tables = [self._window_tables(*each, size) for each in zip(self.parts, of_parts, strict=True)]
        shared = self._shared_inputs(offsets)
        kept: list[list[torch.Tensor]] = [[] for _ in self.parts]  # of each part, of some layers after others
        scores: list[list[torch.Tensor]] = [[] for _ in self.parts]  # the same, of layers that wait to be chosen from

        received = self._repeat(windows[0]) if self.repeats else {}

        def count_bytes(*tensors: torch.Tensor | None) -> None:
            held = sum(tensor.nbytes for tensor in (*tensors, *chain(*kept, *scores)) if tensor is not None)
            self.event_bytes = max(self.event_bytes, held)

        def keep(number: int, chosen: torch.Tensor, num_layers: int) -> None:
            # Layers and heads may keep fewer than there is room for.
            retain = of_parts[number][0].retain
            chosen = torch.nn.functional.pad(chosen, (0, retain - chosen.shape[-1]), value=-1)
            kept[number].append(chosen.unflatten(0, (num_layers, len(of_parts[number]))))

        def select(number: int, layers: Sequence[int], queries: torch.Tensor | None) -> None:
            mine = of_parts[number]
            if not mine:
                return
            retain = mine[0].retain
            with clock.measure("score"):
                inputs = shared | self._inputs(mine, layers, tables[number], size)
                if self.fits:
                    inputs["fits"] = [self.fits[layer] for layer in layers]
                if received:
                    inputs["received"] = torch.stack([received[layer] for layer in layers])
                chosen = self.select(queries, retain=self._mean_retained(retain), **self.options, **inputs)
                if self.mass and self.carries:
                    self.mass.put(layers[0], *_places(mine), inputs["carried"])
                keep(number, chosen, len(layers))
            count_bytes(inputs["keys"], queries, inputs.get("values"))

        def score(number: int, layer: int, queries: torch.Tensor) -> None:
            mine = of_parts[number]
            if not mine:
                return
            with clock.measure("score"):
                inputs = shared | self._inputs(mine, [layer], tables[number], size)
                scores[number].append(self.score(queries, **self.options, **inputs))
            count_bytes(inputs["keys"], queries, inputs.get("values"))
            if (len(scores[number]) + 1) * scores[number][0].nbytes > MAX_SCORE_BYTES:
                choose(number)

        def choose(number: int) -> None:
            waiting = scores[number]
            if not waiting:
                return
            with clock.measure("score"):
                retain = of_parts[number][0].retain
                chosen = self.choose(torch.cat(waiting), retain=retain, **self.options, **shared)
                keep(number, chosen, len(waiting))
            count_bytes()
            waiting.clear()

        def visit(layer: int, queries: torch.Tensor) -> None:
            of_windows = queries.view(len(windows), len(offsets), *queries.shape[1:]).transpose(1, 2)
            if self.method.in_halves:
                score(self.part_of[layer], layer, of_windows)
            else:
                select(self.part_of[layer], [layer], of_windows)

        if len(offsets):
            self._recompute(windows, offsets, visit)
            for number in range(len(self.parts)):
                choose(number)
        else:
            at_once = self._layers_at_once(len(windows) * size)
            for number, part in enumerate(self.parts):
                for first in range(0, len(part.layers), at_once):
                    select(number, part.layers[first : first + at_once], None)
        return [list(torch.cat(of_part).unbind(1)) if of_part else [None] * len(windows) for of_part in kept]

    def _layers_at_once(self, num_pairs: int) -> int:
        """Layers that are selected from in one call, for windows of so many KV pairs together: as many as there is room
        for copies of their keys, or for their scores if there are no copies."""
        if self.method.by_layer:
            return 1
        shape = self.cache.shape
        if self.reads_blocks:
            return max(1, MAX_SCORE_BYTES // (4 * num_pairs * shape.num_kv_heads))
        kinds = 2 if "values" in self.method.arguments else 1
        layer_bytes = num_pairs * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize * kinds
        return max(1, MAX_GATHERED_BYTES // layer_bytes)

    def _mean_retained(self, retain: int) -> int:
        """KV pairs that heads keep on average, where `retain` is what they have room for."""
        if not self.ragged or self.config.budget_tokens is None:
            return retain
        return retain - (self.config.held_tokens - self.config.budget_tokens)

    def _shared_inputs(self, offsets: np.ndarray) -> dict[str, Any]:
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
            "keys": self._keys(layers, tables, size),
            "seeds": [_seed(window) for window in windows] * len(layers),
            "starts": starts * len(layers),
            "last_positions": [window.position + size - 1 for window in windows] * len(layers),
        }
        if "values" in self.method.arguments:
            inputs["values"] = self.operations.gather_values(layers, tables, size)
        if self.ragged:
            inputs["capacity"] = windows[0].retain
            inputs["evicted_mask"] = self.ragged.evicted_mask(layers[0], table_slots, starts, size)
        if self.mass:
            name = "carried" if self.carries else "mass"
            inputs[name] = self.mass.gather(layers[0], table_slots, starts, size)
        if self.observed:
            inputs["observed"] = self.operations.gather_scores(layers, tables, size - self.config.buffer)
        return inputs

    def _keys(self, layers: Sequence[int], tables: torch.Tensor, size: int) -> Keys:
        if not self.reads_blocks:
            return self.operations.gather_keys(layers, tables, size)
        shape, blocks = self.cache.shape, [self.operations.keys[layer] for layer in layers]
        return PagedKeys(blocks, tables, size, shape.head_dim, shape.dtype, rotated=shape.rotated)

    def _softmax(self, layer: int) -> Softmax:
        """The softmax of a layer's attention."""
        options = self.backend.layers[layer]
        sinks = self.model.layers[layer].attention.sinks if options.sinks else None
        return Softmax(self.backend.scale, options.soft_cap, sinks)

    def _window_tables(self, part: CompressedPart, windows: list[_Window], size: int) -> torch.Tensor:
        """Block ids of the windows in a part: int32 `[windows, blocks]`."""
        first = np.array([window.start // self.block_size for window in windows], dtype=np.int64)[:, None]
        blocks = first + np.arange(-(-size // self.block_size))
        tables = part.tables.table[[window.state.table_slot for window in windows]]
        return to_device(np.take_along_axis(tables, blocks, axis=1), self.cache.data.device)

    def _recompute(self, windows: list[Windows], offsets: np.ndarray, visit: Any) -> None:
        """One pass of the model over the query tokens of all windows."""
        of_first = [window for window, *_ in windows if window]
        begins = np.array([window.position for window in of_first])[:, None]
        positions = begins + offsets  # [windows, query tokens]; of KV pairs that were never compressed
        states = [window.state for window in of_first]
        token_ids = [
            state.token_ids[p] for state, of_window in zip(states, positions.tolist(), strict=True) for p in of_window
        ]
        parts = [self._context(part, states, positions) for part in self.parts]
        device = self.cache.data.device
        self.model.recompute_queries(
            to_device(token_ids, device),
            to_device(positions.ravel(), device),
            parts[0]
            if len(parts) == 1
            else PartedAttention(parts, [self.part_of[layer] for layer in sorted(self.part_of)]),
            visit,
        )

    def _repeat(self, windows: Windows) -> dict[int, torch.Tensor]:
        """The highest attention that the KV pairs of one window receive in each layer, while its text is repeated:
        float32 `[kv_heads, size]`."""
        window = next(window for window in windows if window)
        state, parts = window.state, []
        for part, own in zip(self.parts, windows, strict=True):
            length = int(part.tables.kv_lengths([state.table_slot])[0])
            table = part.tables.table[[state.table_slot], : -(-length // self.block_size)]
            region = slice(own.start, own.start + own.size) if own else None
            parts.append(CachedPart(to_device(table, self.cache.data.device), length, region))
        text = RepeatedText(self.operations, parts, self.part_of, self._softmax)
        # Of a whole cache that was cut before, the text is longer than the cache.
        begin = window.start if self.config.policy == "threshold" else window.position
        repeat(self.model, state, (begin, window.position + window.size), text)
        return text.received

    def _context(self, part: CompressedPart, states: list[SequenceState], positions: np.ndarray) -> AttentionContext:
        """Attention in a part, of query tokens `[windows, query tokens]` that are cached."""
        device = self.cache.data.device
        table_slots = [state.table_slot for state in states]
        dropped = part.tables.lengths.logical[table_slots] - part.tables.kv_lengths(table_slots)
        index = positions - dropped[:, None]  # such a KV pair lies behind everything that was dropped
        batch = read_batch(part.tables, table_slots, index, device)
        if self.ragged:
            batch = replace(batch, **self.ragged.of(table_slots))
        return AttentionContext(self.backend, self.operations, self.backend.plan(batch), slot_mapping=None)

    # Movement

    def _runs(self, jobs: list[CompressionJob], states: dict[int, SequenceState]) -> Iterator[tuple[int, int]]:
        """Jobs that are moved together, part by part: the first of each run and the one behind its last.

        A job that needs fresh blocks may get those that a job before it gave back in any part, so it begins a run.
        """
        begins = [0] if jobs else []
        if len(self.parts) > 1:
            begins += [i for i, job in enumerate(jobs[1:], start=1) if self._takes_fresh_blocks(job, states)]
        yield from pairwise([*begins, len(jobs)])

    def _takes_fresh_blocks(self, job: CompressionJob, states: dict[int, SequenceState]) -> bool:
        table_slot = states[job.seq_id].table_slot
        for part in self.parts:
            if own := job.of_part(part.index):
                region = part.tables.table[table_slot, own.first_block : own.first_block + len(own.destinations)]
                if region.tolist() != own.destinations:
                    return True
        return False

    def _compact(
        self, part: CompressedPart, jobs: list[CompressionJob], states: dict[int, SequenceState], kept: Kept
    ) -> None:
        """Move the survivors of all jobs in a part, in all its layers, at once.

        kept: of each job `[layers, windows, kv_heads, retain]`, None where all survives.
        """
        moves = [(own, of_job) for job, of_job in zip(jobs, kept, strict=True) if (own := job.of_part(part.index))]
        indices, sources, regions = [], [], []
        for job, of_job in moves:
            assert of_job is not None
            state = states[job.seq_id]
            start = job.first_block * self.block_size
            cached = int(part.tables.kv_lengths([state.table_slot])[0])
            region_end = min(cached, start + job.region_blocks * self.block_size)
            tail = region_end - start - job.span
            indices.append(region_indices(of_job, job.size, job.size - job.stride, tail))
            sources.append(self._region_blocks(part.tables, job, state))
            if self.recall:
                self.recall.take(job, state, sources[-1], indices[-1])
            regions.append((state.table_slot, start, region_end, cached))
        if not moves:
            return
        if self.ragged:
            counts = torch.stack([(of_job[:, 0] >= 0).sum(-1) for _, of_job in moves if of_job is not None], dim=1)
            table_slots, starts, *_ = zip(*regions, strict=True)
            self.ragged.set(list(table_slots), list(starts), counts, [job.retain for job, _ in moves])
        if self.mass:
            self.mass.compact(regions, indices)
        if self.observed:
            for (job, _), blocks, offsets in zip(moves, sources, indices, strict=True):
                self.observed.compact(job, blocks, offsets)
        self.operations.compact(
            pad(indices),
            self._stack(sources),
            self._stack([job.destinations for job, _ in moves]),
        )

    @staticmethod
    def _region_blocks(tables: BlockTables, job: CompressionJob, state: SequenceState) -> np.ndarray:
        return tables.table[state.table_slot, job.first_block : job.first_block + job.region_blocks]

    def _stack(self, regions: list[Any]) -> torch.Tensor:
        """Lists of block ids -> int64 `[S, longest]`, padded at the end by each list's last block."""
        longest = max(len(blocks) for blocks in regions)
        padded = np.array([[*blocks, *[blocks[-1]] * (longest - len(blocks))] for blocks in regions], dtype=np.int64)
        return to_device(padded, self.cache.data.device)


def _places(windows: list[_Window]) -> tuple[list[int], list[int]]:
    """Table slots of the windows' sequences, and where the windows begin."""
    return [window.state.table_slot for window in windows], [window.start for window in windows]


def _kind(windows: Windows) -> tuple[tuple[int, ...], bool]:
    """The KV pairs of a window, and what each part keeps of them (0 for all); and whether they are learned from."""
    first = windows[0]
    assert first is not None
    return (first.size, *(window.retain if window else 0 for window in windows)), first.learns


def _by_job(kept: Kept, jobs: list[CompressionJob]) -> Kept:
    """Offsets of windows, `[layers, kv_heads, retain]` each -> of jobs, `[layers, windows, kv_heads, retain]`."""
    ends = np.cumsum([job.num_windows for job in jobs]).tolist()
    found: Kept = []
    for job, end in zip(jobs, ends, strict=True):
        windows = [window for window in kept[end - job.num_windows : end] if window is not None]
        found.append(torch.stack(windows, dim=1) if windows else None)
    return found


def _seed(window: _Window) -> int:
    """A number that depends on the sequence and the window's position alone, whatever else is in the batch."""
    return (window.state.sample_row.seed ^ (window.position * 0x9E3779B97F4A7C15)) & (2**63 - 1)
