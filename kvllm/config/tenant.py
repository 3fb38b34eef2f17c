"""What a tenant may have of an engine."""

from __future__ import annotations

import math

from kvllm.config.checks import Options, check_types, require


class TenantConfig(Options, frozen=True, kw_only=True):
    """What one tenant may have of an engine.

    Attributes:
        weight: its part, relative to the weights of the other tenants, of tokens and of the KV pool that is shared.
        guaranteed_share: share of the KV pool that it gets whenever it needs it, from whoever holds more than theirs.
        max_priority: the highest priority of its requests, which is the lowest number; lower ones are raised to it.
            None: no limit.
        cached_share: most of the KV pool that its idle prefix blocks may take.

    Raises ConfigError for what is not allowed.
    """

    weight: float = 1.0
    guaranteed_share: float = 0.0
    max_priority: int | None = None
    cached_share: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        require(0 < self.weight < math.inf, "weight", self.weight, "a number above 0")
        for field in ("guaranteed_share", "cached_share"):
            require(0 <= getattr(self, field) <= 1, field, getattr(self, field), "a share, at least 0 and at most 1")
