"""FlashAttention 3 as an attention backend. Needs the package flash-attn-3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flash_attn_interface import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.flash import arguments_for, as_pages
from kvllm.attention.layer import LayerAttention
from kvllm.attention.runs import RunGroup, attend_parts, groups_of, refuse_evicted_mask, runs_of, upload, with_sinks
from kvllm.kvcache.cache import PagedKVCache


@dataclass(frozen=True)
class FlashPlan:
    """Runs that one call attends. tokens: those of the batch. query_start_loc: int32 `[runs + 1]`. lengths: int32
    `[runs]`, KV pairs that the last token of a run attends. block_tables: `[runs, max_blocks]`."""

    tokens: slice | torch.Tensor
    query_start_loc: torch.Tensor
    lengths: torch.Tensor
    block_tables: torch.Tensor
    max_queries: int


class FlashAttention3Backend(AttentionBackend[list[FlashPlan]]):
    """See `registry.why_not_flash_attn_3` for what it can do.

    The library splits a sequence among several programs if the batch is small, so a token's bits depend on the batch.
    It multiplies values after the end of a sequence by zero (Dao-AILab/flash-attention#2374), so what no request has
    written yet must be finite.
    """

    name = "flash_attn_3"
    capturable = True

    def __init__(
        self, cache: PagedKVCache, num_query_heads: int, scale: float, layers: Sequence[LayerAttention] = ()
    ) -> None:
        super().__init__(cache, num_query_heads, scale, layers)
        self.cache.data.nan_to_num_()

    def plan(self, batch: AttentionBatch) -> list[FlashPlan]:
        refuse_evicted_mask(self.name, batch)
        if len(batch.last_kv_index) == len(batch.block_tables):  # nothing is read back, as a capture demands
            return [FlashPlan(slice(None), batch.query_start_loc, batch.last_kv_index + 1, batch.block_tables, 1)]
        return [self._plan_group(each, batch) for each in groups_of(runs_of(batch), self.cache.data.device)]

    def _plan_group(self, group: RunGroup, batch: AttentionBatch) -> FlashPlan:
        """Decodes have a call of their own: beside chunks the library would split none of them."""
        device = self.cache.data.device
        query_start_loc, lengths = (upload(values.astype(np.int32), device) for values in (group.starts, group.lengths))
        block_tables = batch.block_tables[upload(group.sequences, device)]
        return FlashPlan(group.tokens, query_start_loc, lengths, block_tables, int(np.diff(group.starts).max()))

    def run(
        self, layer: int, queries: torch.Tensor, plan: list[FlashPlan], sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return attend_parts(queries, plan, lambda queries, part: self._attend(layer, queries, part, sinks))

    def _attend(self, layer: int, queries: torch.Tensor, plan: FlashPlan, sinks: torch.Tensor | None) -> torch.Tensor:
        output, log_sums, *_ = flash_attn_with_kvcache(
            queries,
            as_pages(self.keys[layer]),
            as_pages(self.values[layer]),
            cache_seqlens=plan.lengths,
            page_table=plan.block_tables,
            cu_seqlens_q=plan.query_start_loc,
            max_seqlen_q=plan.max_queries,
            softmax_scale=self.scale,
            causal=True,
            return_softmax_lse=True,
            **arguments_for(self.layers[layer]),
        )
        return output if sinks is None else with_sinks(output, log_sums.T, sinks)
