"""OLMo 3: OLMo 2 with three layers of windows to one without, which alone has a scaled RoPE."""

from __future__ import annotations

from typing import Any

from kvllm.models.base import Family
from kvllm.models.olmo2 import Olmo2Keys, build
from kvllm.models.olmo2 import read as read_olmo2
from kvllm.models.rope import FULL, SLIDING, TopKeys, read_rope
from kvllm.models.windows import named_layers, sliding_layers


class Olmo3RopeKeys(TopKeys, kw_only=True):
    THETA = 5e5


class Olmo3Keys(Olmo2Keys, kw_only=True):
    sliding_window: int | None = 4096

    def rope_keys(self) -> TopKeys:
        return self._rope_keys(FULL, self.rope_scaling)

    def sliding_rope_keys(self) -> TopKeys:
        """The keys of the RoPE of layers with a window."""
        return self._rope_keys(SLIDING, None)

    def _rope_keys(self, kind: str, scaling: dict[str, Any] | None) -> TopKeys:
        return Olmo3RopeKeys(
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=self.rope_of_layers(kind),
            rope_scaling=scaling,
            rope_theta=self.rope_theta,
        )


def read(keys: Olmo3Keys) -> dict[str, Any]:
    sliding = [(i + 1) % 4 != 0 for i in range(keys.num_hidden_layers)]
    if keys.layer_types is not None:
        sliding = named_layers(keys, keys.layer_types)
    head_dim = keys.head_dim or keys.hidden_size // keys.num_attention_heads
    return {
        **read_olmo2(keys),
        "layers": sliding_layers(keys, keys.sliding_window, sliding),
        "second_rope": read_rope(keys.sliding_rope_keys(), head_dim),
        "second_rope_layers": tuple(i for i, slides in enumerate(sliding) if slides),
    }


FAMILY = Family(model_type="olmo3", keys=Olmo3Keys, read=read, build=build)
