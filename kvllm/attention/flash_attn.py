"""FlashAttention 2 as an attention backend. Needs the package flash-attn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flash_attn  # which pyright takes to be this file
import numpy as np
import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from packaging.version import Version

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.runs import refuse_evicted_mask, runs_of

FIRST_THAT_SYNCHRONIZES = Version("2.8.4")
"""Sources with this version of the library read the longest length of a paged cache back to the host, since
Dao-AILab/flash-attention#2711, which a capture does not allow."""


@dataclass(frozen=True)
class DecodePlan:
    """One query token of each sequence. lengths: int32 `[S]`, KV pairs that it attends."""

    lengths: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True)
class ChunkPlan:
    """Runs of query tokens. query_start_loc, kv_start_loc: int32 `[runs + 1]`. block_tables: `[runs, max_blocks]`."""

    query_start_loc: torch.Tensor
    kv_start_loc: torch.Tensor
    max_queries: int
    max_kv_pairs: int
    block_tables: torch.Tensor


class FlashAttentionBackend(AttentionBackend):
    """See `registry.why_not_flash_attn` for what it can do.

    The library splits a sequence among several programs if the batch is small, so a token's bits depend on the batch.
    """

    name = "flash_attn"
    capturable = Version(flash_attn.__version__) < FIRST_THAT_SYNCHRONIZES  # pyright: ignore[reportAttributeAccessIssue]

    def plan(self, batch: AttentionBatch) -> DecodePlan | ChunkPlan:
        refuse_evicted_mask(self.name, batch)
        if len(batch.last_kv_index) == len(batch.block_tables):
            return DecodePlan(batch.last_kv_index + 1, batch.block_tables)
        runs, device = runs_of(batch), self.cache.data.device
        sequences = torch.from_numpy(runs.sequences).to(device)
        query_start_loc = torch.from_numpy(runs.starts.astype(np.int32)).to(device)
        kv_start_loc = torch.from_numpy(np.append(0, runs.lengths.cumsum()).astype(np.int32)).to(device)
        most = int(runs.sizes.max()), int(runs.lengths.max())
        return ChunkPlan(query_start_loc, kv_start_loc, *most, batch.block_tables[sequences])

    def run(
        self, layer: int, queries: torch.Tensor, plan: DecodePlan | ChunkPlan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        keys, values = self.keys[layer].transpose(1, 2), self.values[layer].transpose(1, 2)
        if isinstance(plan, DecodePlan):
            return flash_attn_with_kvcache(  # pyright: ignore[reportCallIssue]
                queries.unsqueeze(1),
                keys,
                values,
                cache_seqlens=plan.lengths,
                block_table=plan.block_tables,
                softmax_scale=self.scale,
                **self._options(layer),
            ).squeeze(1)
        return flash_attn_varlen_func(  # pyright: ignore[reportCallIssue]
            queries,
            keys,
            values,
            plan.query_start_loc,
            plan.kv_start_loc,
            plan.max_queries,
            plan.max_kv_pairs,
            softmax_scale=self.scale,
            causal=True,
            block_table=plan.block_tables,
            **self._options(layer),
        )

    def _options(self, layer: int) -> dict[str, Any]:
        """What the library is told of a layer's window and soft cap, if it has any."""
        options, arguments = self.layers[layer], {}
        if options.window is not None:
            arguments["window_size"] = (options.window - 1, 0)  # tokens before a query's own, and behind it
        if options.soft_cap is not None:
            arguments["softcap"] = options.soft_cap
        return arguments
