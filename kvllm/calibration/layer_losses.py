"""What a model loses when a single layer compresses: the losses of `kvllm.layer_shares`.

A text is read once as it is, and once more for each layer and share. There the layer has, after each window, only the
KV pairs that the queries of its buffer attend most, and all other layers have everything. The loss is how far the
predictions go.

What is as in the first reading is not computed again: the layers up to the changed one, and all tokens up to the end of
the first window. Predictions are compared at MOST_ROWS tokens of a text, because a large vocabulary takes as long as
many layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from kvllm.calibration.dense import DenseModel
from kvllm.comparison.texts import Text
from kvllm.compression.methods import kara, token2chunk

SHARES = (0.0, 0.05, 0.15, 0.4, 1.0)
"""Of the KV pairs of a window in front of its buffer."""
MOST_ROWS = 128

Sums = list[list[list[float]]]
"""By text and layer, the divergences at SHARES in nats, summed over the tokens that are compared."""


class Windows(NamedTuple):
    """KV pairs of a window and of its buffer, which is always kept; the next window begins with it."""

    size: int = 384
    buffer: int = 128

    def starts(self, text: Text) -> range:
        """The first token of each window of a text that is full before its last token. None lies in the prompt."""
        return range(len(text.prompt), text.stored + 1 - self.size, self.size - self.buffer)


class Reading:
    """A text that was read as it is. It has at least one window."""

    def __init__(self, model: DenseModel, text: Text, windows: Windows) -> None:
        self.model, self.windows, self.starts = model, windows, windows.starts(text)
        self.begin = self.starts[0] + windows.size
        self.runs, hidden = model.read([*text.prompt, *text.output])
        num_tokens = len(hidden) - self.begin
        self.rows = torch.linspace(0, num_tokens - 1, min(num_tokens, MOST_ROWS), device=model.device).round().long()
        self.whole = model.log_probabilities(hidden[self.begin :][self.rows])

    def losses(self, layer: int) -> list[float]:
        """The divergences at SHARES, summed over `rows`, if a layer compresses. One with a sliding window does not."""
        if self.model.options[layer].window is not None:
            return [0.0] * len(SHARES)
        scores = [self._scores(layer, start) for start in self.starts]
        return [*(self._loss(layer, scores, share) for share in SHARES[:-1]), 0.0]

    def _loss(self, layer: int, scores: Sequence[Tensor], share: float) -> float:
        visible = self.model.visible(layer, self.begin, len(self.runs[layer].keys)).clone()
        for start, of_window in zip(self.starts, scores, strict=True):
            end = start + self.windows.size
            visible[:, end - self.begin :, start:end] &= self._kept(of_window, share)[:, None]
        hidden = self.model.read_again(self.runs, self.begin, layer, visible)
        compressed = self.model.log_probabilities(hidden[self.rows])
        return kl_div(compressed, self.whole, reduction="sum", log_target=True).item()

    def _scores(self, layer: int, start: int) -> Tensor:
        """What the KV pairs of a window are chosen by: float32 `[1, Hkv, size - buffer]`."""
        size, buffer = self.windows
        run, end = self.runs[layer], start + size
        pairs = (run.queries, end - buffer), (run.keys, start)
        queries, keys = (each[begin:end].transpose(0, 1)[None].contiguous() for each, begin in pairs)
        return kara.scores(queries, keys, buffer, self.model.softmax(layer))

    def _kept(self, scores: Tensor, share: float) -> Tensor:
        """Which KV pairs of a window a layer keeps: bool `[Hkv, size]`."""
        size, buffer = self.windows
        retain = buffer + round(share * (size - buffer))
        chosen = token2chunk.choose(scores, retain=retain, buffer=buffer, chunk_budget=0, max_chunk=3)[0]
        return torch.zeros(len(chosen), size, dtype=torch.bool, device=chosen.device).scatter_(1, chosen, True)


@torch.inference_mode()
def measure(
    model: DenseModel, texts: Sequence[Text], windows: Windows, sums: Sums, advance: Callable[[], object]
) -> None:
    """Add to `sums` what it lacks. advance: called after each layer of each text.

    texts: with at least one window each.
    """
    for i, text in enumerate(texts):
        if i == len(sums):
            sums.append([])
        if len(sums[i]) < model.config.num_layers:
            reading = Reading(model, text, windows)
            for layer in range(len(sums[i]), model.config.num_layers):
                sums[i].append(reading.losses(layer))
                advance()


def losses(texts: Sequence[Text], windows: Windows, sums: Sums) -> list[list[float]]:
    """For each layer the divergences at SHARES, in nats a token after the first window."""
    num_tokens = (text.stored + 1 - windows.starts(text)[0] - windows.size for text in texts)
    rows = sum(min(MOST_ROWS, each) for each in num_tokens)
    return [[sum(column) / rows for column in zip(*of_layer, strict=True)] for of_layer in zip(*sums, strict=True)]
