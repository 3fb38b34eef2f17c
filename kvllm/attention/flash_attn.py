"""FlashAttention 2 as an attention backend. Needs the package flash-attn."""

from __future__ import annotations

from dataclasses import dataclass

import flash_attn  # which pyright takes to be this file
import numpy as np
import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from packaging.version import Version

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.flash import arguments_for, as_pages
from kvllm.attention.runs import RunGroup, attend_parts, groups_of, refuse_evicted_mask, runs_of, upload, with_sinks

FIRST_THAT_SYNCHRONIZES = Version("2.8.4")
"""Sources with this version of the library read the longest length of a paged cache back to the host, since
Dao-AILab/flash-attention#2711, which a capture does not allow."""


@dataclass(frozen=True)
class DecodePlan:
    """Query tokens that are alone in their run. tokens: those of the batch. lengths: int32 `[S]`, KV pairs that each
    attends."""

    tokens: slice | torch.Tensor
    lengths: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True)
class ChunkPlan:
    """Longer runs. tokens: those of the batch. query_start_loc, kv_start_loc: int32 `[runs + 1]`. block_tables:
    `[runs, max_blocks]`."""

    tokens: slice | torch.Tensor
    query_start_loc: torch.Tensor
    kv_start_loc: torch.Tensor
    max_queries: int
    max_kv_pairs: int
    block_tables: torch.Tensor


class FlashAttentionBackend(AttentionBackend[list[DecodePlan | ChunkPlan]]):
    """See `registry.why_not_flash_attn` for what it can do.

    The library splits a sequence among several programs if the batch is small, so a token's bits depend on the batch.
    """

    name = "flash_attn"
    capturable = Version(flash_attn.__version__) < FIRST_THAT_SYNCHRONIZES  # pyright: ignore[reportAttributeAccessIssue]

    def plan(self, batch: AttentionBatch) -> list[DecodePlan | ChunkPlan]:
        refuse_evicted_mask(self.name, batch)
        if len(batch.last_kv_index) == len(batch.block_tables):  # nothing is read back, as a capture demands
            return [DecodePlan(slice(None), batch.last_kv_index + 1, batch.block_tables)]
        return [self._plan_group(each, batch) for each in groups_of(runs_of(batch), self.cache.data.device)]

    def _plan_group(self, group: RunGroup, batch: AttentionBatch) -> DecodePlan | ChunkPlan:
        device = self.cache.data.device
        block_tables = batch.block_tables[upload(group.sequences, device)]
        if group.is_decode:
            return DecodePlan(group.tokens, upload(group.lengths.astype(np.int32), device), block_tables)
        query_start_loc = upload(group.starts.astype(np.int32), device)
        kv_start_loc = upload(np.append(0, group.lengths.cumsum()).astype(np.int32), device)
        most = int(np.diff(group.starts).max()), int(group.lengths.max())
        return ChunkPlan(group.tokens, query_start_loc, kv_start_loc, *most, block_tables)

    def run(
        self, layer: int, queries: torch.Tensor, plan: list[DecodePlan | ChunkPlan], sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return attend_parts(queries, plan, lambda queries, part: self._attend(layer, queries, part, sinks))

    def _attend(
        self, layer: int, queries: torch.Tensor, plan: DecodePlan | ChunkPlan, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(plan, DecodePlan):
            output, log_sums = self._decode(layer, queries, plan)
        else:
            output, log_sums = self._attend_chunks(layer, queries, plan)
        return output if sinks is None else with_sinks(output, log_sums, sinks)

    def _decode(self, layer: int, queries: torch.Tensor, plan: DecodePlan) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the logarithms of the softmax's sums, float32 `[T, query_heads]`."""
        output, log_sums = flash_attn_with_kvcache(  # pyright: ignore[reportCallIssue]
            queries.unsqueeze(1),
            as_pages(self.keys[layer]),
            as_pages(self.values[layer]),
            cache_seqlens=plan.lengths,
            block_table=plan.block_tables,
            softmax_scale=self.scale,
            return_softmax_lse=True,
            **arguments_for(self.layers[layer]),
        )
        return output.squeeze(1), log_sums.squeeze(2)

    def _attend_chunks(self, layer: int, queries: torch.Tensor, plan: ChunkPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_decode`."""
        output, log_sums, _ = flash_attn_varlen_func(  # pyright: ignore[reportCallIssue]
            queries,
            as_pages(self.keys[layer]),
            as_pages(self.values[layer]),
            plan.query_start_loc,
            plan.kv_start_loc,
            plan.max_queries,
            plan.max_kv_pairs,
            softmax_scale=self.scale,
            causal=True,
            block_table=plan.block_tables,
            return_attn_probs=True,  # of which there are none without dropout
            **arguments_for(self.layers[layer]),
        )
        return output, log_sums.T
