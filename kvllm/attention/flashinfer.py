"""FlashInfer as an attention backend. Needs the package flashinfer-python."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.layer import LayerAttention
from kvllm.attention.runs import RunGroup, attend_parts, groups_of, refuse_evicted_mask, runs_of, with_sinks

LAYOUT = "HND"
"""`[blocks, kv_heads, block_size, head_dim]`, that of this cache: nothing is copied."""
WORKSPACE_BYTES = 128 << 20
"""Recommended by the library for the partial results of split sequences. Kernels use it one after the other."""


@dataclass(frozen=True)
class Pages:
    """The block tables of runs, one behind the other.

    starts: int32 `[R + 1]`, on the host: run r has the blocks `indices[starts[r] : starts[r + 1]]`. indices: int32, on
    the device. last_page_len: int32 `[R]`, on the host: KV pairs in the last block of a run, at least one.
    """

    starts: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(eq=False)
class GroupPlan:
    """A group of runs. planned: the library's wrappers that were planned for it, one for each kind of layer: window and
    soft cap."""

    group: RunGroup
    pages: Pages
    planned: dict[tuple[int, float], Any] = field(default_factory=dict)

    @property
    def tokens(self) -> slice | torch.Tensor:
        return self.group.tokens


@dataclass(eq=False)
class Lease:
    """A wrapper, which serves one plan at a time. copied: behind the copies of the last planning."""

    wrapper: Any
    user: weakref.ref[GroupPlan]
    copied: torch.cuda.Event | None = None


class FlashInferBackend(AttentionBackend):
    """See `registry.why_not_flashinfer` for what it can do.

    The library plans on the host, for each kind of layer, when the first such layer runs. A plan keeps its wrappers as
    long as it lives, so plans of several parts of KV groups do not disturb each other. The library splits sequences by
    what else is in the batch, so a token's bits depend on the batch.
    """

    name = "flashinfer"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        device = self.cache.data.device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._leases: dict[bool, list[Lease]] = defaultdict(list)  # by whether it decodes

    def plan(self, batch: AttentionBatch) -> list[GroupPlan]:
        refuse_evicted_mask(self.name, batch)
        groups = groups_of(runs_of(batch), self.cache.data.device)
        return [GroupPlan(group, self._pages(group, batch.block_tables)) for group in groups]

    def _pages(self, group: RunGroup, block_tables: torch.Tensor) -> Pages:
        block_size, device = self.cache.shape.block_size, block_tables.device
        counts = -(-group.lengths // block_size)
        starts = np.append(0, counts.cumsum())
        sequences = torch.from_numpy(np.repeat(group.sequences, counts)).to(device)
        columns = torch.from_numpy(np.arange(starts[-1]) - np.repeat(starts[:-1], counts)).to(device)
        last_page_len = group.lengths - (counts - 1) * block_size
        return Pages(_int32(starts), block_tables[sequences, columns], _int32(last_page_len))

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
        window_left = -1 if options.window is None else options.window - 1  # tokens before a query's own
        kind = window_left, options.soft_cap or 0.0
        if kind not in plan.planned:
            lease = self._lease(plan)
            if lease.copied:
                lease.copied.synchronize()  # or planning would overwrite what is still to be copied
            self._plan_wrapper(lease.wrapper, plan, *kind)
            if self.cache.data.is_cuda:
                lease.copied = torch.cuda.Event()
                lease.copied.record()
            plan.planned[kind] = lease.wrapper
        return plan.planned[kind]

    def _lease(self, plan: GroupPlan) -> Lease:
        """A wrapper whose last plan is gone, or a new one: each pins memory of its own."""
        leases = self._leases[plan.group.is_decode]
        for lease in leases:
            if lease.user() is None:
                lease.user = weakref.ref(plan)
                return lease
        workspace = self._workspace
        if plan.group.is_decode:
            wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(  # pyright: ignore[reportCallIssue]
                workspace, LAYOUT, use_tensor_cores=True
            )
        else:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT)  # pyright: ignore[reportCallIssue]
        leases.append(Lease(wrapper, weakref.ref(plan)))
        return leases[-1]

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
            query_starts = _int32(plan.group.starts)
            wrapper.plan(query_starts, pages.starts, pages.indices, pages.last_page_len, *sizes, causal=True, **options)


def _int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))
