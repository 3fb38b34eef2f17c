"""What compressing needs in a worker beside the cache, put together once at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvllm.attention.base import AttentionBackend
from kvllm.compression.model_inputs import WithModelInputs
from kvllm.config import CompressionConfig, EngineConfig
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.tiers.dropped_pairs import DroppedPairs
from kvllm.worker.attention_state import AttentionMass, ObservingBackend, RaggedLengths
from kvllm.worker.compressor import Compressor
from kvllm.worker.group_tables import num_full_parts, part_of_layers
from kvllm.worker.observed_scores import ObservedScores
from kvllm.worker.recall import Recall
from kvllm.worker.selector import CompressedPart, Selector
from kvllm.worker.state import BlockTables


@dataclass
class Compression:
    """backend: the attention backend of steps, which adds attention up where the method chooses by it.

    The rest is None where the method, or an engine without one, has no use for it.
    """

    backend: AttentionBackend
    ragged: RaggedLengths | None = None
    mass: AttentionMass | None = None
    observed: ObservedScores | None = None
    compressor: Compressor | None = None
    recall: Recall | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        operations: KVOperations,
        backend: AttentionBackend,
        config: EngineConfig,
        tables: list[BlockTables],
        select: WithModelInputs | None,
        dropped: DroppedPairs | None,
    ) -> Compression:
        """select, dropped: see ModelRunner."""
        found, compression = cls(backend), config.active_compression
        if compression is None:
            return found
        if dropped:
            found.recall = Recall(operations, dropped, compression)
        found._add_states(compression, config, operations)
        parts = _compressed_parts(config, tables, operations.cache.shape.num_layers)
        selector = Selector(
            model,
            operations,
            found.backend,
            parts,
            compression,
            config.max_num_batched_tokens,
            found.ragged,
            found.mass,
            found.observed,
            select,
        )
        found.compressor = Compressor(selector, operations, found.ragged, found.mass, found.observed, found.recall)
        return found

    def _add_states(self, compression: CompressionConfig, config: EngineConfig, operations: KVOperations) -> None:
        """What is kept of each sequence."""
        cache, max_num_seqs = operations.cache, config.max_num_seqs
        device = cache.data.device
        if compression.spec.ragged:
            self.ragged = RaggedLengths(cache.shape, max_num_seqs, device)
        if config.observes_attention:
            self.mass = AttentionMass(cache.shape, max_num_seqs, config.max_model_len, device)
            self.backend = ObservingBackend(self.backend, operations, self.mass)
        if compression.observes_scores:
            self.observed = ObservedScores(cache, compression, max_num_seqs, config.max_model_len)


def _compressed_parts(config: EngineConfig, tables: list[BlockTables], num_layers: int) -> list[CompressedPart]:
    """Those whose layers attend all tokens."""
    part_of = part_of_layers(config, num_layers)
    return [
        CompressedPart(part, tables[part], [layer for layer, of in enumerate(part_of) if of == part])
        for part in range(num_full_parts(config))
    ]
