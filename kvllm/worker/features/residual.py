"""Room for the last KV pairs of each sequence as they were before a quantized cache rounded them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

import numpy as np
import torch

from kvllm.config import EngineConfig
from kvllm.core.protocol import SequenceStart, StepPlan
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.residual import ResidualStep
from kvllm.stats import MemoryField
from kvllm.worker.features.base import Attend, PassAttention, Restore, StepFeature, WorkerParts
from kvllm.worker.state import SequenceState
from kvllm.worker.step_batch import StepBatch


class KVResidual(StepFeature):
    """Room for the last `size` KV pairs of each sequence, in every layer.

    pairs: `[layers, 2, num_slots, size, kv_heads, head_dim]`, keys before values, of the dtype of activations. The pair
        of position p is in row `p % size`.
    first: int32 `[num_slots]`, on the host: the position from which on a sequence's pairs are held. What lies before it
        was found in the prefix cache.
    """

    captures = False

    def __init__(self, shape: CacheShape, size: int, num_slots: int) -> None:
        rows = (shape.num_layers, 2, num_slots, size, shape.num_kv_heads, shape.head_dim)
        self.pairs = torch.zeros(rows, dtype=shape.dtype)
        self.first = np.zeros(num_slots, dtype=np.int32)
        self._overwritten: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the slots of sequences with drafts: the rows that these take, int64 `[drafts]`, and what was there."""

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        config = worker.config
        if not config.kv_residual_tokens:
            return None
        return cls(worker.shape, config.kv_residual_tokens, config.max_num_seqs)

    @classmethod
    def num_bytes(cls, config: EngineConfig, shape: CacheShape) -> dict[MemoryField, int]:
        vectors = shape.num_layers * 2 * config.max_num_seqs * config.kv_residual_tokens * shape.num_kv_heads
        return {"kv_residual_bytes": vectors * shape.head_dim * shape.dtype.itemsize}

    def start(self, table_slot: int, start: SequenceStart) -> None:
        self.first[table_slot] = start.logical_length

    def save(self, table_slot: int) -> Restore:
        first, pairs = self.first[table_slot], self.pairs[:, :, table_slot].clone()

        def restore(table_slot: int) -> None:
            self.first[table_slot], self.pairs[:, :, table_slot] = first, pairs

        return restore

    def accepted(self, states: Sequence[SequenceState], counts: Sequence[int]) -> None:
        """Put back what wrong drafts have overwritten: the next tokens attend it."""
        for state, count in zip(states, counts, strict=True):
            rows, pairs = self._overwritten[state.table_slot]
            self.pairs[:, :, state.table_slot, rows[count:]] = pairs[:, :, count:]

    def before_pass(self, plan: StepPlan, batch: StepBatch) -> Attend | None:
        self._overwritten = {}
        for state, verification in zip(batch.verified, plan.verifications, strict=True):
            positions = state.logical_length + torch.arange(1, len(verification.token_ids))
            rows = positions % self.pairs.shape[3]
            self._overwritten[state.table_slot] = rows, self.pairs[:, :, state.table_slot, rows]
        return partial(self._attend, batch.table_slots)

    def _attend(self, table_slots: np.ndarray, attention: PassAttention) -> None:
        step = self.step(table_slots, attention.inputs.positions)
        for fields in attention.fields:
            fields["residual"] = step

    def step(self, table_slots: np.ndarray, positions: torch.Tensor) -> ResidualStep:
        """Of the sequences in `table_slots`, whose query tokens are at `positions`."""
        slots = torch.from_numpy(table_slots.astype(np.int32))
        return ResidualStep(self.pairs, positions, slots, torch.from_numpy(self.first[table_slots]))
