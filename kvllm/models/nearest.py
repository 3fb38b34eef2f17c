"""The family whose config is most like that of a checkpoint that kvllm does not run, and what differs."""

from __future__ import annotations

from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from kvllm.models import MODELS, model_family

WITHOUT_EFFECT = {
    *("architectures", "auto_map", "cache_implementation", "chunk_size_feed_forward", "finetuning_task", "id2label"),
    *("initializer_range", "is_encoder_decoder", "label2id", "max_window_layers", "model_type", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "pretraining_tp", "problem_type", "return_dict"),
    *("router_aux_loss_coef", "task_specific_params", "text_config", "tokenizer_class", "transformers_version"),
    *("unsloth_version", "use_cache", "vision_config", "_name_or_path", "_attn_implementation"),
}
"""Keys that say nothing of what a text model computes, as those that end in one of ENDINGS."""
ENDINGS = ("dropout", "_pdrop", "_token_id")


class Likeness(NamedTuple):
    """How far a config is from those of a family, most important first.

    distance: keys that the family does not read, and one more where it refuses the rest. absent: keys of the family
        that the config has not. unlike: of the architectures' names, from 0 to 1.
    """

    distance: int
    absent: int
    unlike: float
    name: str
    unread: list[str]
    refusal: str | None


def nearest_family(config: dict[str, Any], refusal: Callable[[str], str | None]) -> Likeness | None:
    """The most like one of MODELS; None if a `config.json` has no sizes of a decoder.

    refusal: what a family, a key of MODELS, says against the config.
    """
    if not {"hidden_size", "num_hidden_layers", "num_attention_heads"} <= set(config):
        return None
    return min(_likeness(config, name, refusal(name)) for name in MODELS)


def _likeness(config: dict[str, Any], name: str, refusal: str | None) -> Likeness:
    read = set(model_family(name).keys.__struct_encode_fields__)
    given = [key for key, value in config.items() if value and not key.endswith(ENDINGS)]
    unread = [key[:80] for key in given if key not in read | WITHOUT_EFFECT]
    unlike = 1 - SequenceMatcher(None, str(config.get("architectures")), name).ratio()
    return Likeness(len(unread) + (refusal is not None), len(read - set(config)), unlike, name, unread, refusal)
