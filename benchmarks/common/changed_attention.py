"""A model of transformers whose attention a function changes: what it would predict, if KV pairs were gone or faded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

CHANGED = "changed"


@dataclass(frozen=True)
class Attention:
    """The attention of one layer to one text of T tokens.

    query: `[1, Hq, T, d]`, key, value: `[1, Hkv, T, d]`, rotated. scaling: of the logits. module: of transformers.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    module: Any

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.key.shape[1]


Change = Callable[[Attention], Tensor | None]
"""What is added to the logits, `[1, Hq, T, T]` (query token, KV pair); None: nothing."""


def load(path: Path) -> Any:
    """The model of a checkpoint in float32. Called with `change`, it asks that in every layer."""
    AttentionInterface.register(CHANGED, attend)
    AttentionMaskInterface.register(CHANGED, eager_mask)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=CHANGED)
    return model.eval().requires_grad_(False)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    change: Change | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """Attention as the model's own module writes it out, with changed logits. Called by transformers."""
    written_out = sys.modules[type(module).__module__].eager_attention_forward
    if change is not None:
        added = change(Attention(module.layer_idx, query, key, value, rest["scaling"], module))
        if added is not None:
            attention_mask = attention_mask + added
    return written_out(module, query, key, value, attention_mask, **rest)
