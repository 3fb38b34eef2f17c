"""What the attention of a layer does beside a plain softmax over all earlier tokens. Free of torch."""

from __future__ import annotations

import msgspec


class LayerAttention(msgspec.Struct, frozen=True):
    """Options of one layer's attention.

    window: KV pairs that a query token attends, its own and those right before it; None: all up to its own.
    soft_cap: scores, times the scale, are bounded by it: `soft_cap * tanh(score / soft_cap)`; None: by nothing.
    sinks: every query head has a learned score, which takes part in the softmax and has no value.
    """

    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False


PLAIN = LayerAttention()
