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

NAMES = ("enorm", "hnorm", "shared_head.norm", "eh_proj", "")
QWEN_NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc", "layers.0.")
"""Of the norms of tokens, of hidden states and of the result, of the projection of both, and a prefix of the layer."""


class MTPDecoder(Decoder):
    """That layer, between the embedding and the head of its model, of which it has no weights.

    The input at a position is the token after it, and what the model has made of the token there.

    hidden: `[T, hidden_size]`, the latter for each token of the pass that follows, normalized as the input of `logits`;
        there may be more rows.
    """

    def __init__(self, decoder: Decoder, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder.embedding, decoder.layers, decoder.final_norm, decoder.lm_head, config)
        size = config.hidden_size
        self.token_norm, self.hidden_norm = (norm_weight(config, size, dtype, device) for _ in range(2))
        self.projection = LinearWeight(size, 2 * size, dtype, device)
        self.prefix = config.mtp_prefix
        self.hidden = torch.empty(0, size, dtype=dtype, device=device)

    def weights(self) -> dict[str, Weight]:
        *names, projection, layer = QWEN_NAMES if self.prefix == "mtp" else NAMES
        norms = zip(names, (self.token_norm, self.hidden_norm, self.final_norm), strict=True)
        return {
            **{f"{self.prefix}.{name}.weight": whole(norm, self.norm_offset) for name, norm in norms},
            f"{self.prefix}.{projection}.weight": whole_matrix(self.projection),
            **self.layers[0].weights(f"{self.prefix}.{layer}".removesuffix(".")),
        }

    def allocate(self, packing: Packing) -> None:
        self.projection.allocate(packing.unquantized)
        self.layers[0].allocate(packing)

    def share(self, model: Decoder) -> None:
        """Take the embedding and the head of the model."""
        self.embedding, self.lm_head = model.embedding, model.lm_head

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        tokens = rms_norm(self.embedding.forward(token_ids), self.token_norm, self.eps)
        hidden = rms_norm(self.hidden[: len(token_ids)], self.hidden_norm, self.eps)
        return self.projection.multiply(torch.cat((tokens, hidden), 1))
