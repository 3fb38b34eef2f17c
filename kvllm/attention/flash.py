"""What FlashAttention 2 and 3 have in common: how they take the cache, and the options of a layer."""

from __future__ import annotations

from typing import Any

import torch

from kvllm.attention.layer import LayerAttention


def as_pages(part: torch.Tensor) -> torch.Tensor:
    """Keys or values of a layer, `[blocks, kv_heads, block_size, head_dim]`, as a view `[blocks, block_size, kv_heads,
    head_dim]`."""
    return part.transpose(1, 2)


def arguments_for(options: LayerAttention) -> dict[str, Any]:
    """What the library is told of a layer's window and soft cap, if it has any."""
    arguments = {}
    if options.window is not None:
        arguments["window_size"] = (options.window - 1, 0)  # tokens before a query's own, and after it
    if options.soft_cap is not None:
        arguments["softcap"] = options.soft_cap
    return arguments
