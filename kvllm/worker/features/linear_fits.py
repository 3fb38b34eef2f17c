"""What a method learns of each layer while an engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from kvllm.compression.linear_fit import LinearFit
from kvllm.compression.methods.linear_scorer import num_features
from kvllm.compression.registry import MethodInputs
from kvllm.config import EngineConfig
from kvllm.kvcache.cache import CacheShape
from kvllm.stats import MemoryField
from kvllm.worker.features.base import StepFeature, WorkerParts
from kvllm.worker.windows import PartWindows


class LinearFits(StepFeature):
    """A fit for each layer. All ranks begin to learn again when one of them does."""

    def __init__(self, num_layers: int) -> None:
        self.fits = [LinearFit() for _ in range(num_layers)]

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        compression = worker.config.active_compression
        return cls(worker.shape.num_layers) if compression and compression.spec.learns else None

    @classmethod
    def num_bytes(cls, config: EngineConfig, shape: CacheShape) -> dict[MemoryField, int]:
        if config.active_compression is None or not config.active_compression.spec.learns:
            return {}
        of_layer = LinearFit.bytes_for(shape.num_kv_heads, num_features(shape.head_dim))
        return {"method_state_bytes": shape.num_layers * of_layer}

    def reset(self) -> None:
        self.fits = [LinearFit() for _ in self.fits]

    def method_inputs(self, layers: Sequence[int], windows: PartWindows) -> MethodInputs:
        return {"fits": [self.fits[layer] for layer in layers]}
