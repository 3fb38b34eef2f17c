"""Which KV pairs of a window survive: one method per module, all with the same `select`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvllm.attention.compression import kara


class Select(Protocol):
    """Choose the pairs of a window to keep, per sequence and KV head.

    queries: `[S, Hq, rows, d]`, keys: `[S, Hkv, W, d]`, rotated, bfloat16 or float32, on one device.
    Returns int64 `[S, Hkv, retain]`: ascending positions in the window, its last `buffer` positions included.
    With `retain >= W` everything is kept. The result for a sequence does not depend on the others in the batch.
    """

    def __call__(
        self, queries: Tensor, keys: Tensor, *, retain: int, buffer: int, chunk_budget: int, max_chunk: int
    ) -> Tensor: ...


METHODS: dict[str, Select] = {"kara": kara.select}
