"""A machine as far as time and room depend on it, read from a description file."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from msgspec import Struct

from kvllm.config import require
from kvllm.errors import ConfigError

SHIPPED = Path(__file__).parent / "hardware"


class Hardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All rates and sizes are those of one device.

    source: where the figures are from. devices: how many devices there are.
    memory_bytes: of a device. reserved_bytes: of these, what neither weights nor KV pool may take.
    bytes_per_s: peak rate at which memory is read.
    flops_per_s: peak rate of dense matrix products, by dtype.
    bandwidth_efficiency, matmul_efficiency, attention_efficiency: share of these peaks that kernels reach. Attention's
        is of `flops_per_s` of the model's dtype, and counts while it is not limited by reading the cache.
    score_efficiency: share of the float32 peak that scoring a window reaches, softmax included.
    step_seconds: time of a step beside the model: scheduling, building the batch.
    sequence_seconds: the same, for each sequence in it.
    launch_seconds: of these, what several ranks wait for where steps are planned ahead: from the tokens of a step to
        the launch of the next. A single rank puts the tokens into the next step itself. None: steps are not planned
        ahead.
    layer_seconds: time of a layer beside its arithmetic: starting its kernels.
    score_seconds: time of scoring the windows of a pass in a layer, beside the products: starting its kernels.
    select_seconds: time of selecting from the scores of a pass: of a layer, or of all of them where the engine selects
        from these together.
    recall_seconds: time of a recall in a layer, beside its products: starting its operations.
    link_bytes_per_s: rate, per direction, at which devices exchange data. link_seconds: latency of a collective.
    host_bytes_per_s: rate, per direction, at which a device exchanges data with the host's memory. None: they have one
        memory.
    """

    name: str
    source: str = ""
    devices: int = 1
    memory_bytes: float
    reserved_bytes: float = 0.0
    bytes_per_s: float
    flops_per_s: dict[str, float]
    bandwidth_efficiency: float = 1.0
    matmul_efficiency: float = 1.0
    attention_efficiency: float = 1.0
    score_efficiency: float = 1.0
    step_seconds: float = 0.0
    sequence_seconds: float = 0.0
    launch_seconds: float | None = None
    layer_seconds: float = 0.0
    score_seconds: float = 0.0
    select_seconds: float = 0.0
    recall_seconds: float = 0.0
    link_bytes_per_s: float | None = None
    link_seconds: float = 0.0
    host_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        require(self.devices >= 1, "devices", self.devices, "at least 1")
        for field in ("memory_bytes", "bytes_per_s"):
            self._positive(field, getattr(self, field))
        require(bool(self.flops_per_s), "flops_per_s", self.flops_per_s, "a rate for at least one dtype")
        for dtype, rate in self.flops_per_s.items():
            self._positive(f"flops_per_s[{dtype}]", rate)
        for field in ("bandwidth", "matmul", "attention", "score"):
            value = getattr(self, f"{field}_efficiency")
            require(0 < value <= 1, f"{field}_efficiency", value, "a share, above 0 and at most 1")
        self._not_negative("reserved_bytes")
        for part in ("step", "sequence", "layer", "score", "select", "recall", "link"):
            self._not_negative(f"{part}_seconds")
        if self.launch_seconds is not None:
            self._not_negative("launch_seconds")
        if self.devices > 1 or self.link_bytes_per_s is not None:
            self._positive("link_bytes_per_s", self.link_bytes_per_s or 0.0)
        if self.host_bytes_per_s is not None:
            self._positive("host_bytes_per_s", self.host_bytes_per_s)

    def _positive(self, field: str, value: float) -> None:
        require(0 < value < math.inf, field, value, "a number above 0")

    def _not_negative(self, field: str) -> None:
        require(0 <= getattr(self, field) < math.inf, field, getattr(self, field), "a number, at least 0")


def shipped_names() -> list[str]:
    """Descriptions that come with the package."""
    return sorted(file.stem for file in SHIPPED.glob("*.json"))


def load_hardware(name: str) -> Hardware:
    """Read a description, JSON or TOML: one that comes with the package, by name, or a file.

    Raises ConfigError if there is none, or a field is unknown, missing or out of range.
    """
    path = SHIPPED / f"{name}.json" if name in shipped_names() else Path(name)
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    try:
        return decode(path.read_bytes(), type=Hardware)
    except OSError as error:
        raise ConfigError(
            f"hardware {name!r} cannot be read ({error.strerror}): give a file or one of {', '.join(shipped_names())}"
        ) from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; fields are {', '.join(Hardware.__struct_fields__)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid {path.suffix.removeprefix('.').upper() or 'JSON'}: {error}") from None
