"""Gemma 3, text only: Gemma 2 with five layers of windows to one without, a RoPE for either, and norms of heads."""

from __future__ import annotations

from typing import Any

from kvllm.errors import CheckpointError
from kvllm.models.base import Family
from kvllm.models.gemma2 import GELU, GemmaKeys, build, read_gemma
from kvllm.models.rope import FULL, SLIDING, TopKeys, read_rope
from kvllm.models.windows import named_layers


class FullRopeKeys(TopKeys, kw_only=True):
    THETA = 1e6


class Gemma3Keys(GemmaKeys, kw_only=True):
    SCALED = True

    vocab_size: int = 262208
    num_attention_heads: int = 8
    max_position_embeddings: int = 131072
    rope_local_base_freq: float | None = None
    sliding_window_pattern: int | None = None

    def rope_keys(self) -> TopKeys:
        return FullRopeKeys(
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=self.rope_of_layers(FULL),
            rope_scaling=self.rope_scaling,
            rope_theta=self.rope_theta,
        )

    def sliding_rope_keys(self) -> TopKeys:
        """The keys of the RoPE of layers with a window."""
        return TopKeys(
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=self.rope_of_layers(SLIDING),
            rope_theta=self.rope_local_base_freq,
        )


def read(keys: Gemma3Keys) -> dict[str, Any]:
    pattern = 6 if keys.sliding_window_pattern is None else keys.sliding_window_pattern
    if pattern < 1:
        raise CheckpointError(f"sliding_window_pattern is {pattern}, but must be at least 1")
    sliding = [(i + 1) % pattern != 0 for i in range(keys.num_hidden_layers)]
    if keys.layer_types is not None:
        sliding = named_layers(keys, keys.layer_types)
    head_dim = keys.hidden_size // keys.num_attention_heads if keys.head_dim is None else keys.head_dim
    return {
        **read_gemma(keys, sliding),
        "qk_norm": True,
        "second_rope": read_rope(keys.sliding_rope_keys(), head_dim),
        "second_rope_layers": tuple(i for i, slides in enumerate(sliding) if slides),
    }


FAMILY = Family(model_type="gemma3_text", keys=Gemma3Keys, read=read, build=build, hidden_act=GELU)
