"""Drafts of the next tokens of a text, for speculative decoding."""

from __future__ import annotations

from kvllm.config.speculation import SpeculativeConfig
from kvllm.core.drafting.base import Drafter
from kvllm.core.drafting.lookup import NgramDrafter, SuffixDrafter
from kvllm.core.drafting.model import ModelDrafter


def make_drafter(config: SpeculativeConfig) -> Drafter:
    if config.by_model:
        return ModelDrafter()
    return NgramDrafter(*config.lookup) if config.method == "ngram" else SuffixDrafter()
