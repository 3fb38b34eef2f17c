"""What goes wrong in a fleet, or is planned to: deaths, slow machines and rolling drains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from kvllm.config import require
from kvllm.errors import ConfigError


class Failure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that happens to `count` replicas from `replica` on.

    kind: "death": they lose all that they have, at once. "slow": their steps take `factor` times as long. "drain": one
        after the other gets nothing new, ends what it has, and starts again.
    at: seconds from the beginning. seconds: until they are back; of each.
    """

    kind: Literal["death", "slow", "drain"]
    replica: int = 0
    count: int = 1
    at: float = 0.0
    seconds: float = 60.0
    factor: float = 2.0

    def __post_init__(self) -> None:
        require(self.replica >= 0, "replica", self.replica, "at least 0")
        require(self.count >= 1, "count", self.count, "at least 1")
        require(0 <= self.at < math.inf, "at", self.at, "seconds, at least 0")
        require(0 < self.seconds < math.inf, "seconds", self.seconds, "above 0")
        require(0 < self.factor < math.inf, "factor", self.factor, "above 0")

    @property
    def replicas(self) -> range:
        return range(self.replica, self.replica + self.count)


def parse_failures(text: str) -> list[Failure]:
    """Read `key=value,...;key=value,...`, a failure after each semicolon.

    Raises ConfigError for unknown fields, and values that are not allowed.
    """
    return [_parse(part) for part in text.split(";") if part.strip()]


def of_part(failures: Sequence[Failure], first: int, size: int) -> list[Failure]:
    """Of `size` replicas from `first` on, which are numbered from 0."""
    found = []
    for failure in failures:
        own = range(max(failure.replica, first), min(failure.replicas.stop, first + size))
        if own:
            found.append(msgspec.structs.replace(failure, replica=own[0] - first, count=len(own)))
    return found


def _parse(text: str) -> Failure:
    settings = {name: value for name, _, value in (each.partition("=") for each in text.strip().split(","))}
    try:
        return msgspec.convert(settings, Failure, strict=False)
    except msgspec.ValidationError as error:
        fields = ", ".join(Failure.__struct_fields__)
        raise ConfigError(f"--failures: {text!r}: {error}; fields are {fields}") from None
