"""The choice of the KV pairs that survive in windows: queries are recomputed where a method scores by them, then each
window is scored and chosen from, in every layer.

Windows of one size go through the model together, in passes of as many as fit the token budget, at least one. All
passes read the cache as it is before the event, so neither the order of the windows nor the size of a pass can change
what survives. Without queries to recompute, layers are selected from together: operations are as many as for one layer.
So is the choice from scores, where a method has these apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby

import numpy as np
import torch

from kvllm.attention.context import AttentionContext, PartedAttention
from kvllm.compression.mass import Softmax
from kvllm.compression.model_inputs import WithModelInputs
from kvllm.compression.paged_keys import Keys, PagedKeys
from kvllm.compression.queries import query_tokens, window_tokens
from kvllm.compression.registry import METHODS, MethodInputs
from kvllm.core.policies import Threshold
from kvllm.core.protocol import CompressionJob
from kvllm.models.base import Visitor
from kvllm.worker.features.base import WorkerParts
from kvllm.worker.inputs import read_batch
from kvllm.worker.repetition import CachedPart, RepeatedText, repeat
from kvllm.worker.state import SequenceState
from kvllm.worker.timing import PhaseClock
from kvllm.worker.transfer import to_device
from kvllm.worker.windows import CompressedPart, PartWindows, Window, Windows

MAX_GATHERED_BYTES = 64 << 20
"""Keys and values of several layers that are gathered at once; scoring takes a few times as much."""
MAX_SCORE_BYTES = 16 << 20
"""Scores of layers that wait to be chosen from together; choosing takes a few times as much."""

Kept = list[torch.Tensor | None]
"""Offsets that survive, for each of some windows or jobs; None where all do."""


class Selector:
    """Chooses what survives in the windows of compression jobs.

    parts: those of KV groups that attend all tokens; nothing of others is compressed.
    select: called in place of the method itself.
    event_bytes: the most bytes that tensors of one choice took at once.
    """

    def __init__(self, worker: WorkerParts, parts: Sequence[CompressedPart], select: WithModelInputs | None) -> None:
        config = worker.config.active_compression
        assert config is not None
        self.model = worker.model
        self.operations = worker.operations
        self.cache = worker.operations.cache
        self.backend = worker.backend
        self.features = worker.features
        self.adapters = worker.adapters
        self.parts = parts
        self.part_of = {layer: number for number, part in enumerate(parts) for layer in part.layers}
        self.config = config
        self.max_num_batched_tokens = worker.config.max_num_batched_tokens
        self.method = METHODS[config.method]
        self.select = select or self.method
        self.score: Callable[..., torch.Tensor] = (select or self.method).score
        self.choose = self.method.choose
        self.copies_keys = config.spec.keys == "copied" or (
            config.spec.keys == "paged" and not worker.operations.reads_blocks
        )
        self.repeats = config.spec.repeats
        self.options = config.options
        self.block_size = self.cache.shape.block_size
        self.event_bytes = 0

    def survivors(self, jobs: list[CompressionJob], states: dict[int, SequenceState], clock: PhaseClock) -> list[Kept]:
        """For each part, and there for each job, the offsets that its windows keep which were not chosen from before:
        int64 `[layers, windows, kv_heads, retain]`."""
        self.event_bytes = 0
        windows = [window for job in jobs for window in self._windows_of(job, states[job.seq_id])]
        kept: list[Kept] = [[] for _ in self.parts]
        for size, group in groupby(windows, key=_kind):
            alike = list(group)
            recomputed = 0 if self.repeats else query_tokens(self.config, size[0])
            tokens = window_tokens(self.config, size[0])
            windows_per_pass = max(1, self.max_num_batched_tokens // tokens)
            if self.repeats:
                windows_per_pass = 1  # they are repeated one by one
            for i in range(0, len(alike), windows_per_pass):
                of_pass = self._kept(alike[i : i + windows_per_pass], size[0], recomputed, clock)
                for mine, of_part in zip(kept, of_pass, strict=True):
                    mine += of_part
        return [_by_job(of_part, jobs) for of_part in kept]

    def _windows_of(self, job: CompressionJob, state: SequenceState) -> Iterator[Windows]:
        first = job.parts[0]
        begin = first.first_block * self.block_size + state.dropped
        for offset in range(job.chosen * first.stride, job.num_windows * first.stride, first.stride):
            yield tuple(
                Window(state, own.first_block * self.block_size + offset, own.size, own.retain, begin + offset)
                if own.dropped
                else None
                for own in job.parts
            )

    def _kept(self, windows: list[Windows], size: int, num_queries: int, clock: PhaseClock) -> list[Kept]:
        """The offsets that survive in windows of one size: for each part and window `[layers, kv_heads, retain]`.
        num_queries: of a window, those of its last tokens."""
        of_pass = _Pass(self, windows, size, num_queries, clock)
        if num_queries:
            self._recompute(windows, np.arange(size - num_queries, size), of_pass.visit)
        else:
            at_once = self._layers_at_once(len(windows) * size)
            for number, part in enumerate(self.parts):
                for first in range(0, len(part.layers), at_once):
                    of_pass.select(number, part.layers[first : first + at_once], None)
        return of_pass.kept()

    def _layers_at_once(self, num_pairs: int) -> int:
        """Layers that are selected from in one call, for windows of so many KV pairs together: as many as there is room
        for copies of their keys, or for their scores if there are no copies."""
        if self.method.by_layer:
            return 1
        shape = self.cache.shape
        kinds = self.copies_keys + (not self.method.arguments.isdisjoint(("values", "value_norms")))
        if not kinds:
            return max(1, MAX_SCORE_BYTES // (4 * num_pairs * shape.num_kv_heads))
        layer_bytes = num_pairs * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize * kinds
        return max(1, MAX_GATHERED_BYTES // layer_bytes)

    def softmax(self, layer: int) -> Softmax:
        """The softmax of a layer's attention."""
        options = self.backend.layers[layer]
        sinks = self.model.attentions[layer].sinks if options.sinks else None
        return Softmax(self.backend.scale, options.soft_cap, sinks)

    def _recompute(self, windows: list[Windows], offsets: np.ndarray, visit: Visitor) -> None:
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

    def repeat(self, windows: Windows) -> dict[int, torch.Tensor]:
        """The highest attention that the KV pairs of one window receive in each layer, while its text is repeated:
        float32 `[kv_heads, size]`."""
        window = next(window for window in windows if window)
        state, parts = window.state, []
        for part, own in zip(self.parts, windows, strict=True):
            length = int(part.tables.kv_lengths([state.table_slot])[0])
            table = part.tables.table[[state.table_slot], : -(-length // self.block_size)]
            region = slice(own.start, own.start + own.size) if own else None
            parts.append(CachedPart(to_device(table, self.cache.data.device), length, region))
        text = RepeatedText(self.operations, parts, self.part_of, self.softmax)
        # Of a whole cache that was cut before, the text is longer than the cache.
        begin = window.start if self.config.policy.compresses == "cache" else window.position
        repeat(self.model, state, (begin, window.position + window.size), text, self.adapters)
        return text.received

    def _context(self, part: CompressedPart, states: list[SequenceState], positions: np.ndarray) -> AttentionContext:
        """Attention in a part, of query tokens `[windows, query tokens]` that are cached."""
        device = self.cache.data.device
        table_slots = [state.table_slot for state in states]
        dropped = part.tables.dropped[table_slots]
        index = positions - dropped[:, None]  # such a KV pair lies after everything that was dropped
        batch = read_batch(part.tables, table_slots, index, device)
        for feature in self.features:
            if fields := feature.read_fields(table_slots):
                batch = replace(batch, **fields)
        counts = [positions.shape[1]] * len(states)
        adapters = self.adapters.rows(table_slots, counts) if self.adapters else None
        plan = self.backend.plan(batch)
        return AttentionContext(self.backend, self.operations, plan, slot_mapping=None, adapters=adapters)


class _Pass:
    """One pass over windows of one size: what is scored with, and what has been chosen so far.

    num_queries: of each window. Lists are of parts.
    """

    def __init__(
        self, selector: Selector, windows: list[Windows], size: int, num_queries: int, clock: PhaseClock
    ) -> None:
        self.selector = selector
        self.clock = clock
        self.num_windows, self.num_queries = len(windows), num_queries
        pairs = zip(selector.parts, zip(*windows, strict=True), strict=True)
        self.windows = [self._of_part(part, [each for each in of_part if each], size) for part, of_part in pairs]
        self.shared: MethodInputs = {"num_layers": selector.cache.shape.num_layers}
        self.received = selector.repeat(windows[0]) if selector.repeats else {}
        self._chosen: list[list[torch.Tensor]] = [[] for _ in selector.parts]  # of some layers after others
        self._waiting: list[list[torch.Tensor]] = [[] for _ in selector.parts]  # scores of layers to be chosen from

    def visit(self, layer: int, queries: torch.Tensor) -> None:
        """Score a layer, or select from it, by the queries of all windows: `[windows * query tokens, Hq, d]`."""
        of_windows = queries.view(self.num_windows, self.num_queries, *queries.shape[1:]).transpose(1, 2)
        number = self.selector.part_of[layer]
        if self.selector.method.in_halves:
            self._score(number, layer, of_windows)
        else:
            self.select(number, [layer], of_windows)

    def select(self, number: int, layers: Sequence[int], queries: torch.Tensor | None) -> None:
        """Let the method choose in layers of a part."""
        windows, selector = self.windows[number].windows, self.selector
        if not windows:
            return
        with self.clock.measure("score"):
            keys, inputs = self._keys(layers, self.windows[number]), self._inputs(number, layers)
            if self.received:
                inputs["received"] = torch.stack([self.received[layer] for layer in layers])
            retain, buffer = self._mean_retained(windows[0].retain), selector.config.buffer
            chosen = selector.select(
                queries, keys, layers=layers, retain=retain, buffer=buffer, **selector.options, **inputs
            )
            self._keep(number, chosen, len(layers))
        self._count_bytes(keys, queries, inputs.get("values"), inputs.get("value_norms"))

    def kept(self) -> list[Kept]:
        """For each part and window, the offsets that survive, once all layers were visited."""
        for number in range(len(self._waiting)):
            self._choose(number)
        found: list[Kept] = []
        for of_part in self._chosen:
            found.append(list(torch.cat(of_part).unbind(1)) if of_part else [None] * self.num_windows)
        return found

    def _score(self, number: int, layer: int, queries: torch.Tensor) -> None:
        """Score a layer, to be chosen from with others."""
        if not self.windows[number].windows:
            return
        scores, selector = self._waiting[number], self.selector
        with self.clock.measure("score"):
            keys, inputs = self._keys([layer], self.windows[number]), self._inputs(number, [layer])
            buffer = selector.config.buffer
            scores.append(selector.score(queries, keys, layers=[layer], buffer=buffer, **selector.options, **inputs))
        self._count_bytes(keys, queries, inputs.get("values"), inputs.get("value_norms"))
        if (len(scores) + 1) * scores[0].nbytes > MAX_SCORE_BYTES:
            self._choose(number)

    def _choose(self, number: int) -> None:
        """Choose from the layers that wait."""
        scores, selector = self._waiting[number], self.selector
        if not scores:
            return
        with self.clock.measure("score"):
            retain, buffer = self.windows[number].windows[0].retain, selector.config.buffer
            chosen = selector.choose(torch.cat(scores), retain=retain, buffer=buffer, **selector.options, **self.shared)
            self._keep(number, chosen, len(scores))
        self._count_bytes()
        scores.clear()

    def _keep(self, number: int, chosen: torch.Tensor, num_layers: int) -> None:
        # Layers and heads may keep fewer than there is room for.
        windows = self.windows[number].windows
        chosen = torch.nn.functional.pad(chosen, (0, windows[0].retain - chosen.shape[-1]), value=-1)
        self._chosen[number].append(chosen.unflatten(0, (num_layers, len(windows))))

    def _count_bytes(self, *tensors: torch.Tensor | Keys | None) -> None:
        held = sum(tensor.nbytes for tensor in (*tensors, *chain(*self._chosen, *self._waiting)) if tensor is not None)
        self.selector.event_bytes = max(self.selector.event_bytes, held)

    def _mean_retained(self, retain: int) -> int:
        """KV pairs that heads keep on average, where `retain` is what they have room for."""
        policy, spec = self.selector.config.policy, self.selector.config.spec
        if not spec.ragged or not isinstance(policy, Threshold):
            return retain
        return retain - (policy.held_tokens(spec) - policy.budget_tokens)

    def _inputs(self, number: int, layers: Sequence[int]) -> MethodInputs:
        """Those that layers do not share have a row for each window in the first layer, then in the next."""
        selector, windows = self.selector, self.windows[number]
        inputs: MethodInputs = {
            **self.shared,
            "layer": layers[0],
            "softmax": selector.softmax(layers[0]),
            "seeds": [window.seed for window in windows.windows] * len(layers),
            "starts": windows.starts * len(layers),
            "last_positions": [each.position + windows.size - 1 for each in windows.windows] * len(layers),
        }
        if "values" in selector.method.arguments:
            inputs["values"] = selector.operations.gather_values(layers, windows.tables, windows.size)
        if "value_norms" in selector.method.arguments:
            inputs["value_norms"] = selector.operations.value_norms(layers, windows.tables, windows.size)
        for feature in selector.features:
            inputs |= feature.method_inputs(layers, windows)
        return inputs

    def _keys(self, layers: Sequence[int], windows: PartWindows) -> Keys:
        operations, shape = self.selector.operations, self.selector.cache.shape
        if self.selector.copies_keys:
            return operations.gather_keys(layers, windows.tables, windows.size)
        blocks = [operations.keys[layer] for layer in layers]
        return PagedKeys(blocks, windows.tables, windows.size, shape.head_dim, shape.dtype, rotated=shape.rotated)

    def _of_part(self, part: CompressedPart, windows: list[Window], size: int) -> PartWindows:
        block_size = self.selector.block_size
        first = np.array([window.start // block_size for window in windows], dtype=np.int64)[:, None]
        blocks = first + np.arange(-(-size // block_size))
        tables = part.tables.table[[window.state.table_slot for window in windows]]
        of_windows = to_device(np.take_along_axis(tables, blocks, axis=1), self.selector.cache.data.device)
        return PartWindows(part, windows, size, of_windows)


def _kind(windows: Windows) -> tuple[int, ...]:
    """The KV pairs of a window, and what each part keeps of them (0 for all)."""
    first = windows[0]
    assert first is not None
    return (first.size, *(window.retain if window else 0 for window in windows))


def _by_job(kept: Kept, jobs: list[CompressionJob]) -> Kept:
    """Offsets of windows, `[layers, kv_heads, retain]` each -> of jobs, `[layers, windows, kv_heads, retain]`."""
    ends = np.cumsum([job.num_choices for job in jobs]).tolist()
    found: Kept = []
    for job, end in zip(jobs, ends, strict=True):
        windows = [window for window in kept[end - job.num_choices : end] if window is not None]
        found.append(torch.stack(windows, dim=1) if windows else None)
    return found
