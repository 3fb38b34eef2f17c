"""Which KV pairs of a region survive: one method per module, all with the same `select`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from kvllm.compression.methods import (
    adakv,
    chunkkv,
    h2o,
    kara,
    kara_sharp,
    keydiff,
    pyramidkv,
    random,
    rkv,
    sliding_window,
    snapkv,
    streaming,
)


@dataclass(frozen=True)
class Method:
    """How a compression method is called.

    select: chooses the pairs to keep of a region (a window of blocks, or a whole cache).
    queries: the rows it needs: of the whole region ("window"), of the buffer ("buffer"), the last few ("recent"), none.
    options: the names of the further options it takes.
    ragged: layers or heads keep different numbers of pairs; a head's offsets may end in -1.
    observes: needs the attention that every entry has received so far.
    """

    select: Callable[..., Tensor]
    queries: Literal["window", "buffer", "recent", "none"]
    options: tuple[str, ...] = ()
    ragged: bool = False
    observes: bool = False

    def __call__(self, queries: Tensor | None, keys: Tensor, *, retain: int, buffer: int, **offered: Any) -> Tensor:
        """Choose the pairs of a region to keep, per sequence and KV head.

        Args:
            queries: `[S, Hq, rows, d]`, or None for a method that needs none, and
            keys: `[S, Hkv, C, d]`, rotated, bfloat16 or float32, on one device.
            retain: pairs kept of the C; everything is kept if `retain >= C`.
            buffer: the last entries of the region, always kept.
            offered: options of all methods; those that this one does not take are left out.

        Returns:
            int64 `[S, Hkv, kept]`: ascending offsets in the region. The result for a sequence does not depend on the
            others in the batch.
        """
        options = {name: offered[name] for name in self.options if name in offered}
        return self.select(queries, keys, retain=retain, buffer=buffer, **options)


METHODS: dict[str, Method] = {
    "kara": Method(kara.select, "window", ("chunk_budget", "max_chunk")),
    "kara_sharp": Method(kara_sharp.select, "window", ("chunk_budget", "max_chunk", "query_offsets")),
    "kara_no_bi": Method(kara.select, "buffer", ("chunk_budget", "max_chunk")),
    "kara_no_token2chunk": Method(partial(kara.select, chunk_budget=0), "window", ("max_chunk",)),
    "snapkv": Method(snapkv.select, "recent"),
    "rkv": Method(rkv.select, "recent"),
    "keydiff": Method(keydiff.select, "none"),
    "streaming": Method(streaming.select, "none"),
    "pyramidkv": Method(pyramidkv.select, "recent", ("layer", "num_layers", "capacity", "evicted_mask"), ragged=True),
    "adakv": Method(adakv.select, "recent", ("capacity", "evicted_mask"), ragged=True),
    "chunkkv": Method(chunkkv.select, "recent"),
    "h2o": Method(h2o.select, "none", ("mass",), observes=True),
    "sliding_window": Method(sliding_window.select, "none"),
    "random": Method(random.select, "none", ("seeds", "layer")),
}
