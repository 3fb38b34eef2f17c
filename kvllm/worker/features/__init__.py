"""What keeps state beside the KV pool, one file each. A worker has those that its options ask for."""

from __future__ import annotations

from collections import Counter

from kvllm.config import EngineConfig
from kvllm.kvcache.cache import CacheShape
from kvllm.stats import MemoryField
from kvllm.worker.features.adapters import AdapterFeature
from kvllm.worker.features.attention_mass import AttentionMass
from kvllm.worker.features.base import StepFeature, WorkerParts
from kvllm.worker.features.drafts import Drafts
from kvllm.worker.features.kept_pairs import KeptPairsReports
from kvllm.worker.features.observed_scores import ObservedScores
from kvllm.worker.features.offloading import Offloader
from kvllm.worker.features.ragged_lengths import RaggedLengths
from kvllm.worker.features.recall import Recall
from kvllm.worker.features.recurrent_states import RecurrentFeature
from kvllm.worker.features.residual import KVResidual

KINDS: tuple[type[StepFeature], ...] = (
    RaggedLengths,
    AttentionMass,
    KVResidual,
    Recall,
    KeptPairsReports,
    RecurrentFeature,
    AdapterFeature,
    ObservedScores,
    Offloader,  # after all that it saves
    Drafts,
)


def add_features(worker: WorkerParts) -> None:
    """Make those that a worker's options ask for."""
    for kind in KINDS:
        if feature := kind.make(worker):
            worker.features.append(feature)


def bytes_beside_pool(config: EngineConfig, shape: CacheShape) -> dict[MemoryField, int]:
    """Memory of a rank for all of them, by the field of EngineStats that counts it."""
    found = Counter[MemoryField]()
    for kind in KINDS:
        found.update(kind.num_bytes(config, shape))
    return dict(found)
