"""FlashAttention 2 as an attention backend. Needs the package flash-attn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # which pyright takes to be this file

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.runs import refuse_evicted_mask, runs_of


@dataclass(frozen=True)
class DecodePlan:
    """One row of each sequence. lengths: int32 `[S]`, entries that it attends."""

    lengths: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True)
class ChunkPlan:
    """Runs of rows. row_starts, entry_starts: int32 `[runs + 1]`. block_tables: `[runs, max_blocks]`."""

    row_starts: torch.Tensor
    entry_starts: torch.Tensor
    max_rows: int
    max_entries: int
    block_tables: torch.Tensor


class FlashAttentionBackend(AttentionBackend):
    """See `registry.why_not_flash_attn` for what it can do.

    The library splits a sequence among several programs if the batch is small, so a row's bits depend on the batch.
    """

    name = "flash_attn"
    capturable = True

    def plan(self, batch: AttentionBatch) -> DecodePlan | ChunkPlan:
        refuse_evicted_mask(self.name, batch)
        if len(batch.last_kv_index) == len(batch.block_tables):
            return DecodePlan(batch.last_kv_index + 1, batch.block_tables)
        runs, device = runs_of(batch), self.cache.data.device
        sequences = torch.from_numpy(runs.sequences).to(device)
        row_starts = torch.from_numpy(runs.starts.astype(np.int32)).to(device)
        entry_starts = torch.from_numpy(np.append(0, runs.lengths.cumsum()).astype(np.int32)).to(device)
        most = int(runs.sizes.max()), int(runs.lengths.max())
        return ChunkPlan(row_starts, entry_starts, *most, batch.block_tables[sequences])

    def run(self, layer: int, queries: torch.Tensor, plan: DecodePlan | ChunkPlan) -> torch.Tensor:
        keys, values = self.keys[layer].transpose(1, 2), self.values[layer].transpose(1, 2)
        if isinstance(plan, DecodePlan):
            return flash_attn_with_kvcache(  # pyright: ignore[reportCallIssue]
                queries.unsqueeze(1),
                keys,
                values,
                cache_seqlens=plan.lengths,
                block_table=plan.block_tables,
                softmax_scale=self.scale,
            ).squeeze(1)
        return flash_attn_varlen_func(  # pyright: ignore[reportCallIssue]
            queries,
            keys,
            values,
            plan.row_starts,
            plan.entry_starts,
            plan.max_rows,
            plan.max_entries,
            softmax_scale=self.scale,
            causal=True,
            block_table=plan.block_tables,
        )
