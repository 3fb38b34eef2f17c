"""xFormers' memory-efficient attention as an attention backend. Needs the package xformers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from xformers.ops import fmha
from xformers.ops.fmha.attn_bias import (
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalMask,
    PagedBlockDiagonalPaddedKeysMask,
)

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.runs import Runs, refuse_evicted_mask, runs_of


@dataclass(frozen=True)
class RowPlan:
    """Rows that are alone in their run. rows: int64 `[R]`. mask: a block for each row and KV head, whose queries are
    those of a group, over pages that are the rows of one head in one block of the cache."""

    rows: torch.Tensor
    mask: PagedBlockDiagonalPaddedKeysMask


@dataclass(frozen=True)
class ChunkPlan:
    """Longer runs, whose entries are gathered. rows: int64 `[R]`. blocks, offsets: int64 `[entries of all runs]`."""

    rows: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    mask: BlockDiagonalMask


class XformersBackend(AttentionBackend):
    """See `registry.why_not_xformers` for what it can do.

    Lengths are read back to the host for every plan, and chunks need memory for a copy of the entries of one layer: its
    paged operator takes no chunks.
    """

    name = "xformers"

    def plan(self, batch: AttentionBatch) -> list[RowPlan | ChunkPlan]:
        refuse_evicted_mask(self.name, batch)
        runs = runs_of(batch)
        alone = runs.sizes == 1
        plans: list[RowPlan | ChunkPlan] = []
        if alone.any():
            plans.append(self._plan_rows(runs, np.flatnonzero(alone), batch.block_tables))
        if not alone.all():
            plans.append(self._plan_chunks(runs, np.flatnonzero(~alone), batch.block_tables))
        return plans

    def _plan_rows(self, runs: Runs, chosen: np.ndarray, block_tables: torch.Tensor) -> RowPlan:
        device, kv_heads = self.cache.data.device, self.cache.shape.num_kv_heads
        sequences, heads = torch.from_numpy(runs.sequences[chosen]).to(device), torch.arange(kv_heads, device=device)
        pages = block_tables[sequences].unsqueeze(1) * kv_heads + heads[:, None]
        mask = PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            [self.num_query_heads // kv_heads] * (len(chosen) * kv_heads),
            runs.lengths[chosen].repeat(kv_heads).tolist(),
            pages.flatten(0, 1).int(),
            self.cache.shape.block_size,
            device=device,
        )
        return RowPlan(torch.from_numpy(runs.starts[chosen]).to(device), mask)

    def _plan_chunks(self, runs: Runs, chosen: np.ndarray, block_tables: torch.Tensor) -> ChunkPlan:
        device, lengths = self.cache.data.device, runs.lengths[chosen]
        rows = np.concatenate([np.arange(*runs.starts[run : run + 2]) for run in chosen])
        entries = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(device)
        sequences = torch.from_numpy(runs.sequences[chosen].repeat(lengths)).to(device)
        block_size = self.cache.shape.block_size
        blocks = block_tables[sequences, entries // block_size].long()
        sizes = runs.sizes[chosen].tolist()
        mask = BlockDiagonalCausalFromBottomRightMask.from_seqlens(sizes, lengths.tolist(), device=device)
        return ChunkPlan(torch.from_numpy(rows).to(device), blocks, entries % block_size, mask)

    def run(self, layer: int, queries: torch.Tensor, plan: list[RowPlan | ChunkPlan]) -> torch.Tensor:
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for part in plan:
            part_queries = queries[part.rows]
            if isinstance(part, RowPlan):
                attended = self._attend_rows(layer, part_queries, part)
            else:
                attended = self._attend_chunks(layer, part_queries, part)
            output[part.rows] = attended.view(-1, *queries.shape[1:])
        return output

    def _attend_rows(self, layer: int, queries: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        """Each KV head of a row as a sequence of its own, so that pages lie in memory as the operator expects them."""
        query, keys, values = (
            tensor.view(1, -1, 1, queries.shape[2]) for tensor in (queries, self.keys[layer], self.values[layer])
        )
        return fmha.memory_efficient_attention_forward(
            query, keys, values, attn_bias=plan.mask, scale=self.scale, op=fmha.triton_splitk.FwOp
        )

    def _attend_chunks(self, layer: int, queries: torch.Tensor, plan: ChunkPlan) -> torch.Tensor:
        query = queries.unflatten(1, (self.cache.shape.num_kv_heads, -1)).unsqueeze(0)
        keys, values = (
            tensor[plan.blocks, :, plan.offsets][None, :, :, None].expand(-1, -1, -1, query.shape[3], -1)
            for tensor in (self.keys[layer], self.values[layer])
        )
        return fmha.memory_efficient_attention_forward(query, keys, values, attn_bias=plan.mask, scale=self.scale)
