"""The attention batch of a pass over query tokens that are cached already."""

from __future__ import annotations

import numpy as np
import torch

from kvllm.attention.base import AttentionBatch, HostRows
from kvllm.worker.state import BlockTables
from kvllm.worker.transfer import to_device


def read_batch(tables: BlockTables, table_slots: list[int], index: np.ndarray, device: torch.device) -> AttentionBatch:
    """index: `[S, query tokens]`, where in its sequence's cache the KV pair of each is. table_slots: of the S."""
    rows = HostRows(
        np.arange(0, index.size + 1, index.shape[1], dtype=np.int32),
        index.astype(np.int32).ravel(),
    )
    num_blocks = int(index.max()) // tables.block_size + 1
    return AttentionBatch(
        to_device(rows.query_start_loc, device),
        to_device(rows.last_kv_index, device),
        to_device(tables.table[table_slots, :num_blocks], device),
        on_host=rows,
    )
