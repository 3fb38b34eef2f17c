"""FlashInfer as an attention backend. Needs the package flashinfer-python."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

from kvllm.attention.base import AttentionBackend, AttentionBatch, Recording
from kvllm.attention.layer import LayerAttention
from kvllm.attention.runs import (
    RunGroup,
    attend_parts,
    groups_of,
    pinned,
    refuse_evicted_mask,
    runs_of,
    upload,
    with_sinks,
)
from kvllm.kvcache.cache import PagedKVCache

LAYOUT = "HND"
"""`[blocks, kv_heads, block_size, head_dim]`, that of this cache: nothing is copied."""
WORKSPACE_BYTES = 128 << 20
"""Recommended by the library for the partial results of split sequences. Kernels use it one after the other."""
PLAN_BYTES = 8 << 20
"""What the library takes for what kernels read of a plan."""

Kind = tuple[int, float]
"""Of layers that share a plan of the library: tokens of the window before a query's own, or -1; soft cap, or 0."""


@dataclass(frozen=True)
class Pages:
    """The block tables of runs, one after the other.

    starts: int32 `[R + 1]`, on the host: run r has the blocks `indices[starts[r] : starts[r + 1]]`. indices: int32, on
    the device. last_page_len: int32 `[R]`, on the host: KV pairs in the last block of a run, at least one.
    """

    starts: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True)
class GraphBuffers:
    """Where a graph finds the pages of its sequences: as in Pages, but all are on the device."""

    starts: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(eq=False)
class GroupPlan:
    """A group of runs. planned: the library's wrappers that were planned for it, one for each kind of layer.
    buffers: of a plan that a graph holds, which keeps its wrappers. part: as of Recording."""

    group: RunGroup
    pages: Pages
    buffers: GraphBuffers | None = None
    part: int = 0
    planned: dict[Kind, Planner] = field(default_factory=dict)

    @property
    def tokens(self) -> slice | torch.Tensor:
        return self.group.tokens


@dataclass(eq=False)
class Planner:
    """A wrapper of the library, which serves one plan at a time. copied: after the copies of the last planning."""

    wrapper: Any
    user: weakref.ref[GroupPlan]
    copied: torch.cuda.Event | None = None


class FlashInferBackend(AttentionBackend[list[GroupPlan]]):
    """See `registry.why_not_flashinfer` for what it can do.

    The library plans on the host, for each kind of layer, when the first such layer runs. A plan keeps its wrappers as
    long as it lives, so plans of several parts of KV groups do not disturb each other. The library splits sequences by
    what else is in the batch, so a token's bits depend on the batch.

    A graph holds the launches of one plan. How many programs these start follows from the number of sequences; what
    they do is read from memory that the library's `plan` writes, so it is called again before each replay. A wrapper
    has one number of sequences, but those of all graphs share that memory.
    """

    name = "flashinfer"
    capturable = True
    plans_on_host = True

    def __init__(
        self, cache: PagedKVCache, num_query_heads: int, scale: float, layers: Sequence[LayerAttention] = ()
    ) -> None:
        super().__init__(cache, num_query_heads, scale, layers)
        self._recorded = weakref.WeakKeyDictionary[Recording, list[GroupPlan]]()
        self._workspace = self._zeros(WORKSPACE_BYTES)
        self._graph_workspace = self._workspace
        self._graph_plans: dict[tuple[int, Kind], torch.Tensor] = {}  # by part
        self._planners: dict[bool, list[Planner]] = defaultdict(list)  # by whether they decode

    def _zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.cache.data.device)

    def plan(self, batch: AttentionBatch) -> list[GroupPlan]:
        refuse_evicted_mask(self.name, batch)
        if batch.recording is None:
            return [GroupPlan(group, self._pages(group, batch.block_tables)) for group in self._groups(batch)]
        if batch.recording not in self._recorded:
            [group] = self._groups(batch)
            pages, buffers = self._pages(group, batch.block_tables), self._buffers(*batch.block_tables.shape)
            self._recorded[batch.recording] = [GroupPlan(group, pages, buffers, batch.recording.part)]
        return self._recorded[batch.recording]

    def before_replay(self, batch: AttentionBatch) -> None:
        assert batch.recording
        # Without a plan, the graph is captured with what the tensors hold now.
        for plan in self._recorded.get(batch.recording, ()):
            [plan.group] = self._groups(batch)
            plan.pages = self._pages(plan.group, batch.block_tables)
            for kind, planner in plan.planned.items():
                self._plan_for(plan, planner, kind)

    def _groups(self, batch: AttentionBatch) -> list[RunGroup]:
        return groups_of(runs_of(batch), self.cache.data.device)

    def _pages(self, group: RunGroup, block_tables: torch.Tensor) -> Pages:
        block_size, device = self.cache.shape.block_size, block_tables.device
        counts = -(-group.lengths // block_size)
        starts = np.append(0, counts.cumsum())
        sequences = upload(np.repeat(group.sequences, counts), device)
        columns = upload(np.arange(starts[-1]) - np.repeat(starts[:-1], counts), device)
        last_page_len = group.lengths - (counts - 1) * block_size
        return Pages(self._int32(starts), block_tables[sequences, columns], self._int32(last_page_len))

    def _int32(self, values: np.ndarray) -> torch.Tensor:
        return pinned(values.astype(np.int32), self.cache.data.device)

    def run(
        self, layer: int, queries: torch.Tensor, plan: list[GroupPlan], sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return attend_parts(queries, plan, lambda queries, part: self._attend(layer, queries, part, sinks))

    def _attend(self, layer: int, queries: torch.Tensor, plan: GroupPlan, sinks: torch.Tensor | None) -> torch.Tensor:
        wrapper = self._planned(plan, self.layers[layer])
        cache = (self.keys[layer], self.values[layer])
        if sinks is None:
            return wrapper.run(queries, cache)
        output, log2_sums = wrapper.run(queries, cache, return_lse=True)
        return with_sinks(output, log2_sums * math.log(2), sinks)

    def _planned(self, plan: GroupPlan, options: LayerAttention) -> Any:
        """A wrapper that is planned for layers with these options."""
        kind = -1 if options.window is None else options.window - 1, options.soft_cap or 0.0
        if kind not in plan.planned:
            planner = self._lease(plan, kind)
            self._plan_for(plan, planner, kind)
            plan.planned[kind] = planner
        return plan.planned[kind].wrapper

    def _plan_for(self, plan: GroupPlan, planner: Planner, kind: Kind) -> None:
        if planner.copied:
            planner.copied.synchronize()  # or planning would overwrite what is still to be copied
        self._plan_wrapper(planner.wrapper, plan, *kind)
        if self.cache.data.is_cuda:
            planner.copied = torch.cuda.Event()
            planner.copied.record()

    # Wrappers: each has memory of its own, some of it pinned

    def _lease(self, plan: GroupPlan, kind: Kind) -> Planner:
        """A wrapper whose last plan is gone, or a new one; always a new one for a graph, of just its size."""
        if plan.buffers:
            return Planner(self._wrapper_for_graph(plan.buffers, (plan.part, kind)), weakref.ref(plan))
        planners = self._planners[plan.group.is_decode]
        for planner in planners:
            if planner.user() is None:
                planner.user = weakref.ref(plan)
                return planner
        if plan.group.is_decode:
            wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(  # pyright: ignore[reportCallIssue]
                self._workspace, LAYOUT, use_tensor_cores=True
            )
        else:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT)  # pyright: ignore[reportCallIssue]
        planners.append(Planner(wrapper, weakref.ref(plan)))
        return planners[-1]

    def _wrapper_for_graph(self, buffers: GraphBuffers, planned: tuple[int, Kind]) -> Any:
        """planned: the part and kind of layers. Graphs hold several, of which all are planned before a replay."""
        needed = self._graph_bytes(len(buffers.last_page_len))
        if len(self._graph_workspace) < needed:
            self._graph_workspace = self._zeros(needed)
        if planned not in self._graph_plans:
            self._graph_plans[planned] = self._zeros(PLAN_BYTES)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(  # pyright: ignore[reportCallIssue]
            self._graph_workspace,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffers.starts,
            paged_kv_indices_buffer=buffers.indices,
            paged_kv_last_page_len_buffer=buffers.last_page_len,
        )
        wrapper.reset_workspace_buffer(self._graph_workspace, self._graph_plans[planned])
        return wrapper

    def _buffers(self, num_seqs: int, num_blocks: int) -> GraphBuffers:
        sizes = num_seqs + 1, num_seqs * num_blocks, num_seqs
        return GraphBuffers(*(torch.zeros(size, dtype=torch.int32, device=self.cache.data.device) for size in sizes))

    def _graph_bytes(self, num_seqs: int) -> int:
        """Of the partial results of so many sequences with one query token in a graph: a tile of query heads for all
        programs that the library may start, and a sum for each row, both aligned."""
        group = self.num_query_heads // self.cache.shape.num_kv_heads
        tile = 16 if group <= 16 else 64 if group <= 64 else 128
        tiles = -(-num_seqs * group // tile) + num_seqs - 1
        return 4 * self.num_query_heads * tiles * tile * (self.cache.shape.head_dim + 1) + 32

    def _plan_wrapper(self, wrapper: Any, plan: GroupPlan, window_left: int, soft_cap: float) -> None:
        shape, pages = self.cache.shape, plan.pages
        sizes = (self.num_query_heads, shape.num_kv_heads, shape.head_dim, shape.block_size)
        options: dict[str, Any] = {
            "window_left": window_left,
            "logits_soft_cap": soft_cap,
            "sm_scale": self.scale,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
        }
        if plan.group.is_decode:
            wrapper.plan(pages.starts, pages.indices, pages.last_page_len, *sizes, **options)
        else:
            query_starts = self._int32(plan.group.starts)
            wrapper.plan(query_starts, pages.starts, pages.indices, pages.last_page_len, *sizes, causal=True, **options)
