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
from kvllm.attention.runs import Runs, refuse_evicted_mask, runs_of, upload


@dataclass(frozen=True)
class TokenPlan:
    """Query tokens that are alone in their run. tokens: int64 `[R]`. mask: a block for each token and KV head, whose
    queries are those of a group, over pages that are one head of one block of the cache."""

    tokens: torch.Tensor
    mask: PagedBlockDiagonalPaddedKeysMask


@dataclass(frozen=True)
class ChunkPlan:
    """Longer runs, whose KV pairs are gathered. tokens: int64 `[R]`. blocks, offsets: int64 `[pairs of all runs]`."""

    tokens: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    mask: BlockDiagonalMask


class XformersBackend(AttentionBackend[list[TokenPlan | ChunkPlan]]):
    """See `registry.why_not_xformers` for what it can do.

    A plan waits for the device, since its masks are copied there in the library. Chunks need memory for a copy of one
    layer's KV pairs: its paged operator takes no chunks.
    """

    name = "xformers"

    def plan(self, batch: AttentionBatch) -> list[TokenPlan | ChunkPlan]:
        refuse_evicted_mask(self.name, batch)
        runs = runs_of(batch)
        alone = runs.sizes == 1
        plans: list[TokenPlan | ChunkPlan] = []
        if alone.any():
            plans.append(self._plan_tokens(runs, np.flatnonzero(alone), batch.block_tables))
        if not alone.all():
            plans.append(self._plan_chunks(runs, np.flatnonzero(~alone), batch.block_tables))
        return plans

    def _plan_tokens(self, runs: Runs, chosen: np.ndarray, block_tables: torch.Tensor) -> TokenPlan:
        device, kv_heads = self.cache.data.device, self.cache.shape.num_kv_heads
        sequences, heads = upload(runs.sequences[chosen], device), torch.arange(kv_heads, device=device)
        pages = block_tables[sequences].unsqueeze(1) * kv_heads + heads[:, None]
        mask = PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            [self.num_query_heads // kv_heads] * (len(chosen) * kv_heads),
            runs.lengths[chosen].repeat(kv_heads).tolist(),
            pages.flatten(0, 1).int(),
            self.cache.shape.block_size,
            device=device,
        )
        return TokenPlan(upload(runs.starts[chosen], device), mask)

    def _plan_chunks(self, runs: Runs, chosen: np.ndarray, block_tables: torch.Tensor) -> ChunkPlan:
        device, lengths = self.cache.data.device, runs.lengths[chosen]
        tokens = np.concatenate([np.arange(*runs.starts[run : run + 2]) for run in chosen])
        kv_index = upload(np.concatenate([np.arange(length) for length in lengths]), device)
        sequences = upload(runs.sequences[chosen].repeat(lengths), device)
        block_size = self.cache.shape.block_size
        blocks = block_tables[sequences, kv_index // block_size].long()
        sizes = runs.sizes[chosen].tolist()
        mask = BlockDiagonalCausalFromBottomRightMask.from_seqlens(sizes, lengths.tolist(), device=device)
        return ChunkPlan(upload(tokens, device), blocks, kv_index % block_size, mask)

    def run(
        self, layer: int, queries: torch.Tensor, plan: list[TokenPlan | ChunkPlan], sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for part in plan:
            part_queries = queries[part.tokens]
            if isinstance(part, TokenPlan):
                attended = self._attend_tokens(layer, part_queries, part)
            else:
                attended = self._attend_chunks(layer, part_queries, part)
            output[part.tokens] = attended.view(-1, *queries.shape[1:])
        return output

    def _attend_tokens(self, layer: int, queries: torch.Tensor, plan: TokenPlan) -> torch.Tensor:
        """Each KV head of a token as a sequence of its own, so that pages lie in memory as the operator takes them."""
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
