"""The reasoner's network, for training: Qwen3 with few and small layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_LAYERS, HIDDEN, INTERMEDIATE = 4, 192, 512
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 64
CONTEXT, ROPE_THETA, RMS_EPS = 4096, 10_000.0, 1e-6


class RMSNorm(nn.Module):
    def __init__(self, size: int, weight: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), weight))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + RMS_EPS) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, NUM_HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, NUM_KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, NUM_KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(NUM_HEADS * HEAD_DIM, HIDDEN, bias=False)
        # Weights above 1 sharpen attention from the start: nearly every token of a working is a look-up.
        self.q_norm = RMSNorm(HEAD_DIM, 1.5)
        self.k_norm = RMSNorm(HEAD_DIM, 1.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, NUM_HEADS, HEAD_DIM)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, NUM_KV_HEADS, HEAD_DIM)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, NUM_KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        group = NUM_HEADS // NUM_KV_HEADS
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, NUM_HEADS * HEAD_DIM))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(HIDDEN)
        self.self_attn = Attention()
        self.post_attention_layernorm = RMSNorm(HIDDEN)
        self.mlp = MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Reasoner(nn.Module):
    """Qwen3 for training; its parameters are named as in Hugging Face's Qwen3Model, and the embedding is tied."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm = RMSNorm(HIDDEN)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for name, parameter in self.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] for token ids [batch, length]."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def rope_tables(length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, HEAD_DIM / 2] of the rotary angles of positions 0 to length - 1."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
