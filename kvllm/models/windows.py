"""Sliding windows in `config.json`: which layers of a model attend only the last tokens."""

from __future__ import annotations

from collections.abc import Iterable

from kvllm.attention.layer import LayerAttention
from kvllm.errors import CheckpointError
from kvllm.models.config import ConfigKeys, refuse


def has_effect(keys: ConfigKeys, window: int | None) -> bool:
    """Whether a layer that attends the last `window` tokens attends fewer than all of the longest text."""
    if window is not None and window < 1:
        raise CheckpointError(f"sliding_window is {window}, but must be at least 1")
    return window is not None and window < keys.max_position_embeddings


def refuse_window(keys: ConfigKeys, window: int | None) -> None:
    """Raise CheckpointError if layers attend only the last `window` tokens, their own included, and that has an effect.

    None: they attend all.
    """
    if has_effect(keys, window):
        refuse(
            f"some layers attend only a sliding window (of {window} tokens)",
            f"use another checkpoint or, for texts of at most {window} tokens, set max_position_embeddings to {window} "
            "in its config.json",
        )


def sliding_layers(keys: ConfigKeys, window: int | None, sliding: Iterable[bool]) -> tuple[LayerAttention, ...]:
    """The field `layers` of a ModelConfig whose `sliding` layers attend the last `window` tokens, the others all.

    sliding: one for each layer. Nothing if the window has no effect.
    """
    sliding = list(sliding)
    if not has_effect(keys, window) or not any(sliding):
        return ()
    return tuple(LayerAttention(window if slides else None) for slides in sliding)


def named_layers(keys: ConfigKeys, layer_types: list[str]) -> list[bool]:
    """Which of `layer_types` are 'sliding_attention'. Raises CheckpointError if they have no window."""
    sliding = [kind == "sliding_attention" for kind in layer_types]
    if any(sliding) and keys.sliding_window is None:
        refuse("layer_types has 'sliding_attention', but sliding_window is not given")
    return sliding
