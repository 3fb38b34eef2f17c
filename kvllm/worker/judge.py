"""Predictions before and after a compression, whose divergence tells what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import kl_div

from kvllm.attention.base import AttentionBackend
from kvllm.attention.context import AttentionContext
from kvllm.kvcache.ops.base import KVOperations
from kvllm.worker.read_batch import read_batch
from kvllm.worker.state import BlockTables, SequenceState
from kvllm.worker.transfer import to_device

ROWS = 32
"""Tokens whose logits are held at once: with a large vocabulary these are the most memory that judging takes."""


class Judge:
    """Predicts what follows the last `num_tokens` tokens of sequences, with whatever their caches hold.

    A judged compression ends in front of these tokens, so their KV pairs are the last ones of the cache before and
    after it. backend: one that observes nothing.
    """

    def __init__(
        self,
        model: Any,
        operations: KVOperations,
        backend: AttentionBackend,
        tables: BlockTables,
        num_tokens: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.model = model
        self.operations = operations
        self.backend = backend
        self.tables = tables
        self.num_tokens = num_tokens
        self.sequences_per_pass = max(1, max_num_batched_tokens // num_tokens)

    def read(self, states: Sequence[SequenceState]) -> torch.Tensor:
        """Hidden states of the tokens, from a pass that stores nothing: `[sequences, num_tokens, hidden_size]`."""
        size = self.sequences_per_pass
        return torch.cat([self._read(states[i : i + size]) for i in range(0, len(states), size)])

    def _read(self, states: Sequence[SequenceState]) -> torch.Tensor:
        device, count = self.operations.cache.data.device, self.num_tokens
        index = np.array([state.cached_length for state in states])[:, None] + np.arange(-count, 0)
        dropped = np.array([state.dropped for state in states])[:, None]
        token_ids = [state.token_ids[state.logical_length - count : state.logical_length] for state in states]
        batch = read_batch(self.tables, [state.table_slot for state in states], index, device)
        nowhere = torch.full((index.size,), -1, dtype=torch.int64, device=device)
        hidden = self.model.forward(
            to_device(np.array(token_ids).ravel(), device),
            to_device((index + dropped).ravel(), device),
            AttentionContext(self.backend, self.operations, self.backend.plan(batch), nowhere),
        )
        return hidden.view(len(states), count, -1)

    def divergences(self, full: torch.Tensor, compressed: torch.Tensor) -> torch.Tensor:
        """Mean KL(full || compressed) of each sequence, in nats a token: float32 `[sequences]`.

        full, compressed: what `read` has returned before and after.
        """
        rows = zip(full.flatten(0, 1).split(ROWS), compressed.flatten(0, 1).split(ROWS), strict=True)
        of_tokens = torch.cat([self._divergence(*pair) for pair in rows])
        return of_tokens.view(len(full), -1).mean(dim=1).clamp_(min=0)  # rounding may put nothing below 0

    def _divergence(self, full: torch.Tensor, compressed: torch.Tensor) -> torch.Tensor:
        expected, found = (self.model.logits(hidden).log_softmax(-1) for hidden in (full, compressed))
        return kl_div(found, expected, reduction="none", log_target=True).sum(-1)
