"""One pass of a model over whole prompts, without a cache: hidden states, pooled, and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import NamedTuple

import torch

from kvllm.models.base import Decoder
from kvllm.models.config import ModelConfig
from kvllm.pooling.attention import BidirectionalPass, CausalPasses
from kvllm.pooling.head import ACTIVATIONS, PoolingHead
from kvllm.pooling_config import Activation, Pooling
from kvllm.worker.threads import operators_alone
from kvllm.worker.transfer import to_device


class PoolingRequest(NamedTuple):
    """A prompt, and what is made of it.

    every: a vector of each token, instead of one of the prompt. dimensions: to which a vector is cut; None for none.
    activation: of vectors.
    """

    token_ids: list[int]
    every: bool = False
    dimensions: int | None = None
    activation: Activation = "Identity"


class PoolingRunner:
    """Runs passes. causal: None if tokens attend those after them, too."""

    def __init__(
        self,
        model: Decoder,
        head: PoolingHead,
        config: ModelConfig,
        pooling: Pooling,
        causal: CausalPasses | None,
        device: torch.device,
    ) -> None:
        self.head = head
        self._model = model
        self._config = config
        self._pooling = pooling
        self._causal = causal
        self._device = device

    @torch.inference_mode()
    def run(self, requests: Sequence[PoolingRequest]) -> list[torch.Tensor]:
        """Compute prompts together: float32 `[numbers]` of each, or `[tokens, numbers]`, on the host."""
        alone = self._device.type == "cpu" and self._causal is not None
        with operators_alone() if alone else nullcontext():
            vectors = self._vectors(requests)
        sizes = [len(request.token_ids) if request.every else 1 for request in requests]
        return [self._finish(*each) for each in zip(requests, vectors.split(sizes), strict=True)]

    def _vectors(self, requests: Sequence[PoolingRequest]) -> torch.Tensor:
        """Of all requests, one or as many as tokens of each, one after the other: `[R, numbers]`."""
        lengths = [len(request.token_ids) for request in requests]
        ends = list(accumulate(lengths))
        device, wanted = self._device, None
        if self._pooling != "MEAN" and not any(request.every for request in requests):
            chosen = [end - 1 for end in ends] if self._pooling == "LAST" else [0, *ends[:-1]]
            wanted = to_device(chosen, device)
        token_ids = to_device([token for request in requests for token in request.token_ids], device)
        positions = to_device([place for length in lengths for place in range(length)], device)
        attention = self._causal.attention(lengths) if self._causal else BidirectionalPass(self._config, lengths)
        hidden = self._model.forward(token_ids, positions, attention, wanted)
        if wanted is None:
            parts = zip(requests, hidden.split(lengths), strict=True)
            hidden = torch.cat([self._pooled(request.every, part) for request, part in parts])
        return self.head.forward(hidden.float()).cpu()

    def _pooled(self, every: bool, hidden: torch.Tensor) -> torch.Tensor:
        """Of one prompt: `[tokens, hidden_size]` -> float32 `[1, hidden_size]`, or of all tokens."""
        if every:
            return hidden.float()
        if self._pooling == "MEAN":
            return hidden.float().mean(0, keepdim=True)
        return hidden[-1:].float() if self._pooling == "LAST" else hidden[:1].float()

    def _finish(self, request: PoolingRequest, vectors: torch.Tensor) -> torch.Tensor:
        vectors = ACTIVATIONS[request.activation](vectors[:, : request.dimensions])
        return vectors if request.every else vectors[0]
