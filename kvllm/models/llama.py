"""The Llama decoder. Qwen2 adds a bias on q, k and v, Qwen3 an RMSNorm of every query and key head."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvllm.attention.context import AttentionContext
from kvllm.models.config import ModelConfig
from kvllm.models.elementwise import add_rms_norm, rms_norm, rotary, silu_mul
from kvllm.models.layers import (
    LMHead,
    MergedColumnLinear,
    QKVLinear,
    RowLinear,
    VocabEmbedding,
    Weight,
    rotary_table,
    whole,
)
from kvllm.parallel import Shard


class DecoderLayer:
    """The weights of one layer."""

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.qkv = QKVLinear(config, shard, dtype, device)
        self.q_norm = torch.empty(config.head_dim, dtype=dtype, device=device) if config.qk_norm else None
        self.k_norm = torch.empty(config.head_dim, dtype=dtype, device=device) if config.qk_norm else None
        self.o = RowLinear(config.num_query_heads * config.head_dim, hidden, shard, dtype, device)
        self.post_attention_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.gate_up = MergedColumnLinear(hidden, inner, ("gate_proj", "up_proj"), shard, dtype, device)
        self.down = RowLinear(inner, hidden, shard, dtype, device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        found = {
            f"{prefix}.input_layernorm.weight": whole(self.input_norm),
            f"{prefix}.post_attention_layernorm.weight": whole(self.post_attention_norm),
            **self.qkv.weights(f"{prefix}.self_attn"),
            **self.o.weights(f"{prefix}.self_attn.o_proj"),
            **self.gate_up.weights(f"{prefix}.mlp"),
            **self.down.weights(f"{prefix}.mlp.down_proj"),
        }
        if self.q_norm is not None and self.k_norm is not None:
            found[f"{prefix}.self_attn.q_norm.weight"] = whole(self.q_norm)
            found[f"{prefix}.self_attn.k_norm.weight"] = whole(self.k_norm)
        return found

    def pack(self) -> None:
        for product in (self.qkv, self.o, self.gate_up, self.down):
            product.pack()


class LlamaModel:
    """One rank's shard of a model. Its weights are uninitialized until a loader fills them and calls `pack`.

    num_query_heads, num_kv_heads: of this rank.
    """

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.embedding = VocabEmbedding(config.vocab_size, config.hidden_size, shard, dtype, device)
        self.layers = [DecoderLayer(config, shard, dtype, device) for _ in range(config.num_layers)]
        self.final_norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = LMHead(self.embedding, config.tie_word_embeddings, shard)
        self.num_query_heads = self.layers[0].qkv.num_query_heads
        self.num_kv_heads = self.layers[0].qkv.num_kv_heads
        self.cos_sin = rotary_table(config, max_model_len, device)
        # The norm that follows each layer: residual addition and norm are one operation.
        self._next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]

    def weights(self) -> dict[str, Weight]:
        """Every tensor of the checkpoint, by name. Not to be called after `pack`."""
        found = self.embedding.weights("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            found |= layer.weights(f"model.layers.{index}")
        found["model.norm.weight"] = whole(self.final_norm)
        return found | self.lm_head.weights("lm_head")

    def pack(self) -> None:
        """Bring all weights into the form that is multiplied fastest, one at a time."""
        for layer in self.layers:
            layer.pack()
        self.lm_head.pack()

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionContext) -> torch.Tensor:
        """Compute tokens and write their keys and values to the cache.

        token_ids, positions: int64 `[T]`; positions below `max_model_len`. attention: for these query tokens.
        Returns the normalized hidden states `[T, hidden_size]`, the input of `logits`.
        """
        residual = self.embedding.forward(token_ids)
        x = rms_norm(residual, self.layers[0].input_norm, self.eps)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv.forward(x)
            self._rotate(layer, qkv, positions, self.num_kv_heads)
            queries, keys, values = (part.unflatten(1, (-1, self.head_dim)) for part in qkv.split(layer.qkv.sizes, 1))
            attention.store(index, keys, values)
            x = self._finish_layer(index, attention.run(index, queries), residual)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, hidden_size]` -> float32 `[R, vocab_size]`."""
        return self.lm_head.forward(hidden).float()

    def recompute_queries(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionContext,
        visit: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Recover the queries of cached tokens: a forward pass that reads the cache and writes nothing.

        The arguments are those of `forward`; the keys and values of the tokens are in the cache already, so any subset
        of rows may be asked for. `visit(layer, queries)` gets the rotated queries `[T, query_heads, head_dim]` of this
        rank, layer by layer.

        Kara (paper, C.2) scores a window with these. Tokens whose prefix was compressed since they were computed get
        other queries than back then, from the second layer on.
        """
        residual = self.embedding.forward(token_ids)
        x = rms_norm(residual, self.layers[0].input_norm, self.eps)
        for index, layer in enumerate(self.layers):
            queries = layer.qkv.forward_queries(x)
            self._rotate(layer, queries, positions, 0)
            queries = queries.unflatten(1, (-1, self.head_dim))
            visit(index, queries)
            if index + 1 < len(self.layers):
                x = self._finish_layer(index, attention.run(index, queries), residual)

    def _rotate(self, layer: DecoderLayer, qkv: torch.Tensor, positions: torch.Tensor, num_kv_heads: int) -> None:
        rotary(
            qkv,
            positions,
            self.cos_sin,
            self.num_query_heads,
            num_kv_heads,
            self.head_dim,
            layer.q_norm,
            layer.k_norm,
            self.eps,
        )

    def _finish_layer(self, index: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """From attention's output `[T, query_heads, head_dim]` to the normalized input of the next layer; `residual`
        is updated in place."""
        layer = self.layers[index]
        x = layer.o.forward(attended.flatten(1))
        x = add_rms_norm(residual, x, layer.post_attention_norm, self.eps)
        x = layer.down.forward(silu_mul(layer.gate_up.forward(x)))
        return add_rms_norm(residual, x, self._next_norms[index], self.eps)
