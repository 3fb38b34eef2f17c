"""Multi-token prediction: the layer that a checkpoint has after its last one, which says the token after the next
(DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

import torch

from kvllm.models.base import Decoder
from kvllm.models.config import ModelConfig
from kvllm.models.elementwise import rms_norm
from kvllm.models.experts import whole_matrix
from kvllm.models.layers import Weight, whole
from kvllm.models.parts import norm_weight
from kvllm.models.weights import LinearWeight, Packing


class MTPDecoder(Decoder):
    """That layer, between the embedding and the head of its model, of which it has no weights.

    The input at a position is the token after it, and what the model has made of the token there.

    hidden: `[T, hidden_size]`, the latter for each token of the pass that follows, normalized as the input of `logits`.
        After `logits`, that call's rows: what the layer itself has made of tokens, in place of the model.
    """

    def __init__(self, decoder: Decoder, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder.embedding, decoder.layers, decoder.final_norm, decoder.lm_head, config)
        size = config.hidden_size
        self.token_norm, self.hidden_norm = (norm_weight(config, size, dtype, device) for _ in range(2))
        self.projection = LinearWeight(size, 2 * size, dtype, device)
        self.prefix = f"model.layers.{config.mtp_layer}"
        self.hidden = torch.empty(0, size, dtype=dtype, device=device)

    def weights(self) -> dict[str, Weight]:
        norms = {"enorm": self.token_norm, "hnorm": self.hidden_norm, "shared_head.norm": self.final_norm}
        return {
            **{f"{self.prefix}.{name}.weight": whole(norm, self.norm_offset) for name, norm in norms.items()},
            f"{self.prefix}.eh_proj.weight": whole_matrix(self.projection),
            **self.layers[0].weights(self.prefix),
        }

    def allocate(self, packing: Packing) -> None:
        self.projection.allocate(packing.unquantized)
        self.layers[0].allocate(packing)

    def share(self, model: Decoder) -> None:
        """Take the embedding and the head of the model."""
        self.embedding, self.lm_head = model.embedding, model.lm_head

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        tokens = rms_norm(self.embedding.forward(token_ids), self.token_norm, self.eps)
        return self.projection.multiply(torch.cat((tokens, rms_norm(self.hidden, self.hidden_norm, self.eps)), 1))

    def logits(self, hidden: torch.Tensor, *, rounded: bool = False) -> torch.Tensor:
        self.hidden = hidden
        return super().logits(hidden, rounded=rounded)
