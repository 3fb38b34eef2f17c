"""A model that reads one text at once, with no cache, and can read a part of it again with other attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvllm.attention.layer import PLAIN
from kvllm.compression.mass import Softmax
from kvllm.errors import CheckpointError
from kvllm.models.config import load_model_config
from kvllm.models.loader import load_model
from kvllm.models.rotary import rotary_frequencies
from kvllm.parallel import SingleRank


class LayerRun(NamedTuple):
    """What one layer has of a text of T tokens.

    residual: `[T, hidden_size]`, its input. queries: `[T, Hq, d]`, keys, values: `[T, Hkv, d]`, rotated.
    """

    residual: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor


class DenseModel:
    """A checkpoint in float32, on a GPU if there is one. longest: tokens of the longest text.

    Raises CheckpointError as `load_model` does.
    """

    def __init__(self, path: Path, longest: int) -> None:
        self.config = load_model_config(path)
        if self.config.recurrent is not None:
            raise CheckpointError(
                f"{path} has layers with a recurrent state, of which nothing is calibrated: use a method that needs no "
                "calibration"
            )
        if self.config.two_sizes is not None:
            raise CheckpointError(
                f"{path} has layers with heads of two sizes, of which nothing is calibrated: use a method that needs "
                "no calibration"
            )
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_model(path, self.config, SingleRank(), torch.float32, self.device, longest)
        self.frequencies = rotary_frequencies(self.config, longest).to(self.device)
        self.options = self.config.layers or (PLAIN,) * self.config.num_layers
        self.layers = self.model.layers
        self.norms = [*(layer.input_norm for layer in self.layers), self.model.final_norm]

    def read(self, token_ids: Sequence[int]) -> tuple[list[LayerRun], Tensor]:
        """What each layer has of a text, and the normalized hidden states `[T, hidden_size]` after the last."""
        positions = torch.arange(len(token_ids), device=self.device)
        residual = self.model.embedding.forward(torch.tensor(token_ids, device=self.device))
        x, runs = self.layers[0].normalized(residual, self.norms[0]), []
        for i, layer in enumerate(self.layers):
            queries, keys, values = self.model.attentions[i].project(x, positions)
            runs.append(LayerRun(residual.clone(), queries, keys, values))
            attended = self._attend(i, queries, keys, values, self.visible(i, 0, len(positions)))
            x = layer.finish(attended, residual, self.norms[i + 1])
        return runs, x

    def read_again(self, runs: Sequence[LayerRun], begin: int, changed: int, visible: Tensor) -> Tensor:
        """The hidden states `[T - begin, hidden_size]` of a text's tokens from `begin` on, where these attend to
        `visible` `[Hkv, T - begin, T]` in layer `changed`. Nothing is computed that is as in `runs`."""
        positions = torch.arange(begin, len(runs[0].residual), device=self.device)
        residual, queries, keys, values = runs[changed]
        residual = residual[begin:].clone()
        attended = self._attend(changed, queries[begin:], keys, values, visible)
        x = self.layers[changed].finish(attended, residual, self.norms[changed + 1])
        for i in range(changed + 1, len(self.layers)):
            queries, *new = self.model.attentions[i].project(x, positions)
            keys, values = (torch.cat((old[:begin], own)) for old, own in zip(runs[i][2:], new, strict=True))
            attended = self._attend(i, queries, keys, values, self.visible(i, begin, len(keys)))
            x = self.layers[i].finish(attended, residual, self.norms[i + 1])
        return x

    def visible(self, layer: int, begin: int, end: int) -> Tensor:
        """What the tokens from `begin` to `end` attend to in a layer: bool `[Hkv, end - begin, end]`."""
        window = self.options[layer].window or end
        positions = torch.arange(end, device=self.device)
        back = positions[begin:, None] - positions
        return ((back >= 0) & (back < window)).expand(self.config.num_kv_heads, -1, -1)

    def softmax(self, layer: int) -> Softmax:
        return Softmax(self.config.scale, self.options[layer].soft_cap, self.model.attentions[layer].sinks)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """`[R, hidden_size]` -> `[R, vocab_size]`."""
        return self.model.logits(hidden).log_softmax(dim=-1)

    def _attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """`[R, Hq, d]` over `[T, Hkv, d]`, one KV head at a time, so that long texts fit in memory."""
        softmax, found = self.softmax(layer), []
        for head, own in enumerate(queries.unflatten(1, (keys.shape[1], -1)).unbind(1)):
            scaled = own.transpose(0, 1) * softmax.scale_of(keys.shape[2])
            logits = softmax.bounded(scaled @ keys[:, head].T).masked_fill_(~visible[head], -torch.inf)
            if softmax.sinks is not None:
                sinks = softmax.sinks.view(keys.shape[1], -1, 1, 1)[head]
                logits = torch.cat((logits, sinks.expand(*logits.shape[:2], 1)), dim=-1)
            found.append((logits.softmax(dim=-1)[..., : len(keys)] @ values[:, head]).transpose(0, 1))
        return torch.cat(found, dim=1)
