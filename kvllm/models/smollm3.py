"""SmolLM3: Llama with layers whose queries and keys are not rotated, every fourth one as a rule."""

from __future__ import annotations

from typing import Any

from kvllm.attention.layer import LayerAttention
from kvllm.errors import CheckpointError
from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys
from kvllm.models.rope import NO_ROPE
from kvllm.models.windows import named_layers, sliding_layers


class SmolLM3Keys(ConfigKeys, kw_only=True):
    THETA = 2e6

    num_key_value_heads: int | None = 4
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_sliding_window: bool = False
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4


def _still_layers(keys: SmolLM3Keys) -> tuple[int, ...]:
    """The layers without RoPE. `no_rope_layers` has a 1 for each layer that has one, whatever its name says."""
    if keys.no_rope_layers is None:
        if keys.no_rope_layer_interval < 1:
            raise CheckpointError(f"no_rope_layer_interval is {keys.no_rope_layer_interval}, but must be at least 1")
        return tuple(range(keys.no_rope_layer_interval - 1, keys.num_hidden_layers, keys.no_rope_layer_interval))
    if len(keys.no_rope_layers) < keys.num_hidden_layers:
        raise CheckpointError(
            f"no_rope_layers has {len(keys.no_rope_layers)} numbers, but num_hidden_layers is {keys.num_hidden_layers}"
        )
    return tuple(i for i in range(keys.num_hidden_layers) if not keys.no_rope_layers[i])


def _windows(keys: SmolLM3Keys, still: tuple[int, ...]) -> tuple[LayerAttention, ...]:
    """transformers gives windows to the layers without RoPE, where the config does not name others."""
    sliding = [keys.use_sliding_window and i in still for i in range(keys.num_hidden_layers)]
    if keys.layer_types is not None:
        sliding = named_layers(keys, keys.layer_types)
    return sliding_layers(keys, keys.sliding_window, sliding)


def read(keys: SmolLM3Keys) -> dict[str, Any]:
    still = _still_layers(keys)
    return {
        "qkv_bias": keys.attention_bias,
        "output_bias": keys.attention_bias,
        "mlp_bias": bool(keys.mlp_bias),
        "layers": _windows(keys, still),
        "second_rope": NO_ROPE,
        "second_rope_layers": still,
    }


FAMILY = Family(model_type="smollm3", keys=SmolLM3Keys, read=read, build=build_decoder)
