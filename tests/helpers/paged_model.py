"""A model with its own paged cache, run without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.context import AttentionContext
from kvllm.attention.reference import ReferenceBackend
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.ops.registry import make_operations
from kvllm.kvcache.recurrent import RecurrentStates, RecurrentStep
from kvllm.models.base import Decoder
from kvllm.models.config import ModelConfig, load_model_config
from kvllm.models.loader import load_model
from kvllm.parallel import Shard, SingleRank
from kvllm.worker.build import state_shape

CPU = torch.device("cpu")


class PagedModel:
    """A model with a cache for a few sequences of up to 64 tokens, in blocks of 4 that are strewn over the pool."""

    def __init__(
        self,
        model: Decoder,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        backend: Callable[..., AttentionBackend] = ReferenceBackend,
    ) -> None:
        self.model = model
        shared = config.latent is not None
        shape = CacheShape(config.num_layers, model.num_kv_heads, config.head_dim, 4, dtype, shared=shared)
        self.cache = PagedKVCache(shape, num_blocks=48)
        self.cache.data.fill_(float("nan"))
        self.backend = backend(self.cache, model.num_query_heads, config.scale, config.layers)
        self.operations = make_operations(self.cache)
        self.tables = torch.randperm(48, generator=torch.Generator().manual_seed(0)).view(3, 16)
        self.lengths = [0, 0, 0]
        state = state_shape(config, dtype, config.num_query_heads // model.num_query_heads)
        self.states = RecurrentStates(state, 3) if state else None

    def forward(self, chunks: Mapping[int, Sequence[int]], wanted: Sequence[int] | None = None) -> torch.Tensor:
        """Compute the next tokens of some sequences in one step: hidden states of all query tokens, or of those."""
        index = [self.lengths[s] + i for s, tokens in chunks.items() for i in range(len(tokens))]
        token_tables = torch.cat([self.tables[s].expand(len(tokens), -1) for s, tokens in chunks.items()])
        positions = torch.tensor(index)
        slots = token_tables.gather(1, positions[:, None] // 4)[:, 0] * 4 + positions % 4
        plan = self.plan({s: len(tokens) for s, tokens in chunks.items()}, index)
        for sequence, tokens in chunks.items():
            self.lengths[sequence] += len(tokens)
        token_ids = torch.tensor([token for tokens in chunks.values() for token in tokens])
        rows = None if wanted is None else torch.tensor(wanted)
        attention = self.context(plan, slots)
        if self.states:
            counts = [len(tokens) for tokens in chunks.values()]
            starts = torch.tensor([0, *counts]).cumsum(0).int()
            step = RecurrentStep(self.states, torch.tensor(list(chunks)).int(), starts)
            attention = replace(attention, recurrent=step)
        return self.model.forward(token_ids, positions, attention, rows)

    def context(self, plan: Any, slot_mapping: torch.Tensor | None = None) -> AttentionContext:
        return AttentionContext(self.backend, self.operations, plan, slot_mapping)

    def plan(self, num_tokens: dict[int, int], index: list[int]) -> Any:
        starts = torch.tensor([0, *num_tokens.values()]).cumsum(0)
        tables = self.tables[list(num_tokens)]
        return self.backend.plan(AttentionBatch(starts.int(), torch.tensor(index).int(), tables.int()))

    def logits(self, chunks: Mapping[int, Sequence[int]]) -> torch.Tensor:
        head = self.model.lm_head
        return head.shard.all_gather_last_dim(self.model.logits(self.forward(chunks)))[:, : head.vocab_size]


def load(
    path: Path, dtype: torch.dtype = torch.float32, shard: Shard | None = None, *, expand: bool = False
) -> tuple[Decoder, ModelConfig]:
    config, shard = load_model_config(path), shard or SingleRank()
    return load_model(path, config, shard, dtype, CPU, config.max_position_embeddings, expand=expand), config


def tokens(length: int, seed: int = 1, vocab_size: int = 256) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
