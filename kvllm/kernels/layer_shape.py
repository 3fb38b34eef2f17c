"""What attention kernels are compiled for: the sizes of a layer's heads and cache, and its options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import triton
import triton.language as tl

WIDEST = 512
"""Channels of a vector that are one operand of a product; those after them are another one."""
SEGMENT = 256
# Segments of a sequence at most: those of longer ones are larger. It bounds the memory of partials.
_MAX_SEGMENTS = 64


def segments(group: int) -> tuple[int, int]:
    """KV pairs of a segment, and the most segments of a sequence, for `group` query heads of a KV head: fewer and
    larger ones where heads are many, or partials would take more than the KV pairs."""
    factor = max(1, triton.next_power_of_2(group) // 32)
    return SEGMENT * factor, max(1, _MAX_SEGMENTS // factor)


@dataclass(frozen=True)
class LayerShape:
    """One argument of a kernel, whose fields are constants in it.

    group: query heads of a KV head. block_size: KV pairs of a block; 0 where keys are in none. shared: values are the
    keys. ragged: heads have evicted KV pairs of their own. window: KV pairs that a query token attends; 0 for all.
    soft_cap: in base 2; 0 for none. channels, rest: of both parts of a vector, powers of two; there is no rest but for
    heads of more than WIDEST. segment, max_segments: as `segments` has them.
    """

    kv_heads: int
    group: int
    block_size: int
    head_dim: int
    shared: bool = False
    ragged: bool = False
    window: int = 0
    soft_cap: float = 0.0
    channels: int = field(init=False)
    rest: int = field(init=False)
    segment: int = field(init=False)
    max_segments: int = field(init=False)

    def __post_init__(self) -> None:
        """Triton finds a compiled kernel by the fields of its shape: what it is compiled for must be among them."""
        channels = min(WIDEST, max(16, triton.next_power_of_2(self.head_dim)))
        rest = triton.next_power_of_2(self.head_dim - WIDEST) if self.head_dim > WIDEST else 0
        segment, max_segments = segments(self.group)
        derived = {"channels": channels, "rest": rest, "segment": segment, "max_segments": max_segments}
        for name, value in derived.items():
            object.__setattr__(self, name, value)


if TYPE_CHECKING:
    constexpr_shape = LayerShape
else:  # Triton takes for constants what is annotated so, and reads no other global names in a kernel
    constexpr_shape = tl.constexpr
