"""What a model loses when a single layer compresses: the losses of `kvllm.layer_shares`.

A text is read once as it is, and once for each layer and share. There the layer has, behind each window, only the KV
pairs that `kara_sharp` keeps of it, and all other layers have everything. The loss is how far the predictions go.
transformers computes both, for any checkpoint that it loads.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from benchmarks.common import changed_attention
from benchmarks.common.changed_attention import Attention
from benchmarks.common.texts import Text
from kvllm.compression.mass import Softmax
from kvllm.compression.methods import kara_sharp
from kvllm.models.config import load_model_config

SHARES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
"""Of the KV pairs of a window in front of its buffer."""


class OneLayer:
    """Attention in which one layer keeps a share of each window of a text, once the window is full."""

    def __init__(self, text: Text, layer: int, share: float, window: int, buffer: int) -> None:
        self.layer = layer
        self.starts = starts(text, window, buffer)
        self.window, self.buffer = window, buffer
        self.retain = buffer + round(share * (window - buffer))

    def __call__(self, attention: Attention) -> Tensor | None:
        if attention.layer != self.layer:
            return None
        num_heads, length = attention.key.shape[1:3]
        added = torch.zeros(num_heads, length, length, device=attention.key.device)
        for start in self.starts:
            end = start + self.window
            is_kept = torch.zeros(num_heads, self.window, dtype=torch.bool, device=added.device)
            is_kept.scatter_(1, self._chosen(attention, slice(start, end)), True)
            added[:, end:, start:end].masked_fill_(~is_kept[:, None], -torch.inf)
        return added.repeat_interleave(attention.group, dim=0)[None]

    def _chosen(self, attention: Attention, window: slice) -> Tensor:
        """Offsets in a window that the layer keeps: int64 `[Hkv, retain]`."""
        module = attention.module
        softmax = Softmax(
            attention.scaling, getattr(module, "attn_logit_softcapping", None), getattr(module, "sinks", None)
        )
        offsets = torch.arange(self.window, device=attention.key.device)
        queries, keys = attention.query[:, :, window].contiguous(), attention.key[:, :, window].contiguous()
        both = kara_sharp.both_scores(queries, keys, self.buffer, offsets, softmax)
        return kara_sharp.choose(both, retain=self.retain, buffer=self.buffer, chunk_budget=0, max_chunk=3)[0]


def starts(text: Text, window: int, buffer: int) -> range:
    """The first token of each window of a text that is full before its last token."""
    return range(text.num_prompt, len(text.token_ids) - window, window - buffer)


@torch.no_grad()
def measure(path: Path, found: Iterable[Text], window: int, buffer: int) -> list[list[float]]:
    """For each layer the divergences at SHARES, in nats a token behind the first window. A layer with a sliding window
    loses nothing, because nothing of it is compressed.

    found: texts with at least one window each.
    """
    model = changed_attention.load(path)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    windows = load_model_config(path).windows
    sums = torch.zeros(len(windows), len(SHARES), dtype=torch.float64)
    tokens = 0
    for text in found:
        ids = torch.tensor([text.token_ids], device=model.device)
        behind = starts(text, window, buffer)[0] + window
        whole = model(ids, use_cache=False).logits[0, behind:].log_softmax(dim=-1)
        tokens += len(whole)
        for layer, sliding in enumerate(windows):
            for i, share in enumerate(SHARES[:-1] if sliding is None else ()):
                change = OneLayer(text, layer, share, window, buffer)
                compressed = model(ids, use_cache=False, change=change).logits[0, behind:].log_softmax(dim=-1)
                sums[layer, i] += kl_div(compressed, whole, reduction="sum", log_target=True).item()
    return (sums / tokens).tolist()
