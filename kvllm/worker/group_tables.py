"""The block tables of a worker: one for each part of the KV groups, with room for the longest sequence."""

from __future__ import annotations

from kvllm.config import EngineConfig
from kvllm.kvcache.groups import full_groups, layer_parts
from kvllm.worker.state import Lengths, PartTables


def make_tables(config: EngineConfig, lengths: Lengths) -> PartTables:
    """In the first part, unless its layers have a window, `lengths` say where KV pairs are."""
    widths = table_widths(config, config.max_num_batched_tokens)
    return PartTables(lengths, widths, config.block_size, first_counts=not num_full_parts(config))


def num_full_parts(config: EngineConfig) -> int:
    """Parts whose layers attend all tokens, the first ones."""
    return sum(len(group.parts) for group in full_groups(config.kv_groups))


def table_widths(config: EngineConfig, chunk: int) -> list[int]:
    """Most blocks of a sequence in each part, if a step computes at most `chunk` tokens of it."""
    return [
        group.most_blocks(config.max_model_len, config.block_size, chunk) // len(group.parts)
        for group in config.kv_groups
        for _ in group.parts
    ]


def part_of_layers(config: EngineConfig, num_layers: int) -> list[int]:
    """The index of each layer's part."""
    parts = layer_parts(config.kv_groups)
    part_of = {layer: index for index, layers in enumerate(parts) for layer in layers}
    return [part_of.get(layer, 0) for layer in range(num_layers)]
