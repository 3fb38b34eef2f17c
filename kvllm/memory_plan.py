"""The memory that a model and its KV cache take, and how many sequences fit, from `config.json` alone.

The bytes of a block are those of the engine's own pool (`CacheShape`), and the lengths under compression are those of
its scheduler (`Regions`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from kvllm.config import EngineConfig, require
from kvllm.core.capacity import peak_blocks, tail_start
from kvllm.core.policies import group_regions
from kvllm.core.regions import Regions
from kvllm.kvcache.groups import UNIFORM, KVGroup, block_layers, full_groups, sliding_blocks
from kvllm.models.config import ModelConfig
from kvllm.models.loader import empty_model
from kvllm.parallel import Shard, SingleRank
from kvllm.worker.adapter_weights import adaptable_weights, adapter_bytes
from kvllm.worker.build import DTYPES, draft_bytes_per_block, rank_cache_shape


@dataclass(frozen=True)
class LayerType:
    """Layers that hold the same KV pairs of a sequence.

    name: "full" or "sliding". layers: how many there are. window: tokens that a token attends, its own included; None
    for all before it.
    """

    name: str
    layers: int
    window: int | None = None

    def held(self, length: int) -> int:
        """KV pairs in one layer that a sequence of `length` tokens needs, if nothing is compressed."""
        return length if self.window is None else min(length, self.window)

    def blocks(self, length: int, block_size: int) -> int:
        """Blocks that one sequence needs at most to decode up to `length` tokens, if nothing is compressed."""
        return KVGroup(self.window).most_blocks(length, block_size, 1)


@dataclass(frozen=True)
class MemoryPlan:
    """One model under one configuration of the engine.

    config: `num_blocks` of it is not read. layer_types: all layers, by what they hold of a sequence.
    weights_bytes: of the whole model, in `dtype`. pair_bytes: of one token in one layer, of all KV heads;
    key_bytes, value_bytes: of its key and value alone.
    rank_weights_bytes, rank_block_bytes: of weights, and of one block, on each of `num_ranks` ranks.
    rank_state_bytes: of a sequence's state in recurrent layers there.
    draft_weights_bytes, draft_block_bytes: of the model that drafts, on the first rank, whose pool has as many blocks.
    rank_adapter_bytes: on each rank, of as many adapters as may be in use.
    """

    model: ModelConfig
    config: EngineConfig
    dtype: str
    num_ranks: int
    layer_types: tuple[LayerType, ...]
    weights_bytes: int
    pair_bytes: int
    key_bytes: int
    value_bytes: int
    rank_weights_bytes: int
    rank_block_bytes: int
    rank_state_bytes: int
    draft_weights_bytes: int = 0
    draft_block_bytes: int = 0
    rank_adapter_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.pair_bytes * self.model.num_layers

    def layer_token_units(self, length: int) -> int:
        """KV pairs of one sequence, summed over the layers."""
        return sum(kind.layers * kind.held(length) for kind in self.layer_types)

    def kv_bytes(self, length: int, num_sequences: int = 1) -> int:
        """Bytes of the KV pairs of sequences of `length` tokens."""
        return num_sequences * self.pair_bytes * self.layer_token_units(length)

    def blocks_per_sequence(self, length: int) -> dict[str, int]:
        """Blocks that one sequence needs at most to reach `length` tokens, by the name of the layer type."""
        return {kind.name: kind.blocks(length, self.config.block_size) for kind in self.layer_types}

    @property
    def block_layers(self) -> int:
        """Layers that a block has places for."""
        return block_layers(self.config.kv_groups, self.model.num_layers)

    @property
    def all_layers_block_bytes(self) -> int:
        """Bytes on each rank of a block, if it has places for all layers."""
        return self.rank_block_bytes // self.block_layers * self.model.num_layers

    @property
    def block_bytes(self) -> int:
        """Bytes on the first rank of a block, and of one in the pool of the model that drafts."""
        return self.rank_block_bytes + self.draft_block_bytes

    @property
    def has_windows(self) -> bool:
        return any(kind.window is not None for kind in self.layer_types)

    @property
    def compresses(self) -> bool:
        return self.config.active_compression is not None

    def compressed_length(self, length: int, prompt: int) -> int:
        """KV pairs that a layer without a window holds at last of `length` tokens, `prompt` of them the prompt; in the
        mean over such layers, rounded up, where they keep different shares."""
        if not self.compresses:
            return length
        full = sum(kind.layers for kind in self.layer_types if kind.window is None)
        return -(-self._compressed_units(length, prompt) // full)

    def compressed_kv_bytes(self, length: int, prompt: int, num_sequences: int = 1) -> int:
        """Bytes of the KV pairs of sequences of `length` tokens at last, compressed in layers without a window."""
        sliding = sum(kind.layers * kind.held(length) for kind in self.layer_types if kind.window is not None)
        return num_sequences * self.pair_bytes * (self._compressed_units(length, prompt) + sliding)

    def _compressed_units(self, length: int, prompt: int) -> int:
        """KV pairs that all layers without a window hold at last of `length` tokens."""
        full = sum(kind.layers for kind in self.layer_types if kind.window is None)
        units = 0
        for group, regions in zip(full_groups(self.config.kv_groups), self._regions or [], strict=bool(self._regions)):
            *_, held = regions.cached_lengths(prompt, length, tail_start(self.config, prompt))
            units += (group.num_layers or full) * held
        return units if self._regions else full * length

    def pool_bytes(self, memory: int, utilization: float) -> int:
        """Bytes of the KV pool on the first rank, with that of the model that drafts, if the rank has `memory` bytes
        of which `utilization` may be in use.

        The memory of a step beside weights and KV pool is measured when an engine starts; here it is left out.
        Raises ConfigError if the weights leave no room for a block.
        """
        require(0 < utilization <= 1, "gpu_memory_utilization", utilization, "above 0, at most 1")
        held = self.rank_weights_bytes + self.draft_weights_bytes + self.rank_adapter_bytes
        left = int(memory * utilization) - held
        weights = f"{held / 1e9:.1f} GB of weights lie on each of {self.num_ranks} ranks"
        require(left >= self.block_bytes, "gpu_memory", f"{memory / 1e9:g} GB", f"more: {weights}")
        return left

    def concurrency(self, pool_bytes: int, length: int, prompt: int, *, windows: bool = True, compressed: bool) -> int:
        """Sequences of `length` tokens that a pool of so many bytes on each rank holds at once.

        windows: sliding layers give up what lies after their window. compressed: full layers hold what compression
        leaves of a sequence, at its peak.
        """
        if windows:
            blocks = self.block_bytes * self.blocks_held(length, prompt, compressed=compressed)
        else:
            block_bytes = self.all_layers_block_bytes + self.draft_block_bytes
            blocks = block_bytes * UNIFORM[0].most_blocks(length, self.config.block_size, 1)
        return pool_bytes // (blocks + self.rank_state_bytes)

    def blocks_held(self, length: int, prompt: int, *, compressed: bool) -> int:
        """Blocks of the pool that a sequence holds at most when it decodes up to `length` tokens, in all KV groups."""
        groups, regions = self.config.kv_groups, self._regions if compressed else None
        full = peak_blocks(self.config, regions, prompt, length)
        return full + sliding_blocks(groups, length, self.config.block_size, 1)

    @property
    def _regions(self) -> list[Regions] | None:
        """The lengths under compression in each KV group that attends all tokens."""
        active, groups = self.config.active_compression, full_groups(self.config.kv_groups)
        return active and group_regions(active, self.config.block_size, groups)


def plan_memory(
    model: ModelConfig, config: EngineConfig, dtype: str, num_ranks: int = 1, draft: ModelConfig | None = None
) -> MemoryPlan:
    """The plan of a model whose weights have the type `dtype`, on so many tensor-parallel ranks. draft: a model that
    drafts for it, in the same type. Adapters have the highest rank in all matrices.

    Raises ConfigError if the ranks cannot share the model out equally.
    """
    require(num_ranks >= 1, "tensor_parallel_size", num_ranks, "at least 1")
    whole, rank = (rank_cache_shape(model, dtype, config, ranks) for ranks in (1, num_ranks))
    key, value = whole.vector_bytes
    of_draft = (0, 0)
    if draft is not None:
        plain = EngineConfig(num_blocks=1, max_model_len=config.max_model_len, block_size=config.block_size)
        shape = rank_cache_shape(draft, dtype, plain, 1)
        of_draft = (weights_bytes(draft, dtype, SingleRank()), draft_bytes_per_block(draft, shape))
    return MemoryPlan(
        model,
        config,
        dtype,
        num_ranks,
        layer_types(model),
        weights_bytes(model, dtype, SingleRank()),
        whole.bytes_per_block // (whole.num_places * config.block_size),
        whole.num_kv_heads * key,
        whole.num_kv_heads * value,
        weights_bytes(model, dtype, _FirstRank(num_ranks)),
        rank.bytes_per_block,
        rank.recurrent.bytes_per_sequence if rank.recurrent else 0,
        *of_draft,
        config.max_loras * _adapter_bytes(model, dtype, num_ranks, config.max_lora_rank),
    )


def layer_types(model: ModelConfig) -> tuple[LayerType, ...]:
    """The layers of a model, by what they hold of a sequence."""
    numbers = Counter(model.windows)
    windows = sorted(window for window in numbers if window is not None)
    found = [LayerType("full", numbers[None])] if None in numbers else []
    for window in windows:
        name = "sliding" if len(windows) == 1 else f"sliding {window}"
        found.append(LayerType(name, numbers[window], window))
    return tuple(found)


def weights_bytes(model: ModelConfig, dtype: str, shard: Shard) -> int:
    """Bytes of the weights of one rank in that type; an embedding that gives the logits, too, counts once.

    Raises ConfigError if the ranks cannot share the model out equally.
    """
    decoder = empty_model(model, shard, DTYPES[dtype], torch.device("meta"), 1)
    numbers = sum(math.prod(weight.target.shape) for weight in decoder.weights().values())
    return numbers * DTYPES[dtype].itemsize


def _adapter_bytes(model: ModelConfig, dtype: str, num_ranks: int, rank: int) -> int:
    """Bytes of one adapter on each of so many ranks."""
    decoder = empty_model(model, _FirstRank(num_ranks), DTYPES[dtype], torch.device("meta"), 1)
    return adapter_bytes(adaptable_weights(decoder.weights()), rank, DTYPES[dtype])


class _FirstRank(SingleRank):
    """The first of several ranks, none of which runs."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
