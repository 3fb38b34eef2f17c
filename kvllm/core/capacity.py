"""Blocks that sequences need, and the lengths that a pool allows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Sequences
from typing import Any

from kvllm.config import EngineConfig, require
from kvllm.core.policies import CompressionPolicy, make_policy
from kvllm.core.regions import Regions
from kvllm.core.sequence import Sequence
from kvllm.errors import RequestError
from kvllm.kvcache.groups import full_groups, sliding_blocks


def peak_blocks(config: EngineConfig, regions: Sequences[Regions] | None, prompt: int, total: int) -> int:
    """Most blocks that a sequence alone needs in the layers that attend all tokens, to reach `total` tokens, `prompt`
    of them its prompt, if everything is compressed when complete.

    regions: of each KV group of such layers. None if nothing is ever dropped.
    """
    groups, block_size = full_groups(config.kv_groups), config.block_size
    if regions is None:
        return sum(len(group.parts) for group in groups) * -(-total // block_size)
    # Windows are compressed in all groups at once.
    by_group = [each.cached_lengths(prompt, total, tail_start(config, prompt)) for each in regions]
    return max(
        sum(len(group.parts) * -(-length // block_size) for group, length in zip(groups, lengths, strict=True))
        for lengths in zip(*by_group, strict=True)
    )


def tail_start(config: EngineConfig, prompt: int) -> int:
    """The first KV pair of a sequence that compression may touch, after `prompt` tokens of its prompt or at 0."""
    return 0 if config.compression is not None and config.compression.compress_prompt else prompt


def blocks_alone(config: EngineConfig, regions: Sequences[Regions] | None, prompt: int, total: int) -> int:
    """Most blocks that a sequence alone needs in all KV groups; arguments as for `peak_blocks`."""
    full = peak_blocks(config, regions, prompt, total)
    return full + sliding_blocks(config.kv_groups, total, config.block_size, config.max_num_batched_tokens)


def longest_blocks(config: EngineConfig) -> int:
    """Blocks that a sequence of `max_model_len` needs, compressed if that is on."""
    policy = make_policy(config)
    return blocks_alone(config, policy and policy.group_regions, 1, config.max_model_len - 1)


def check_pool(config: EngineConfig) -> None:
    """Raises ConfigError unless a sequence of `max_model_len` fits into the pool."""
    blocks = longest_blocks(config)
    require(
        blocks <= config.num_blocks,
        "max_model_len",
        config.max_model_len,
        f"a sequence of that length needs {blocks} KV blocks of {config.block_size} tokens and the pool has "
        f"{config.num_blocks}: lower max_model_len, or raise kv_cache_memory_bytes or num_gpu_blocks_override",
    )


def longest_alone(config: EngineConfig, policy: CompressionPolicy[Any] | None, seq: Sequence) -> int:
    """The length at which a sequence ends at the latest: its `max_length`, or what it reaches with the whole pool to
    itself, if its request leaves that open (`max_tokens=None`).

    Raises:
        RequestError: it cannot become as long as it has to, or its budget is too small.
    """
    if policy:
        policy.check(seq.prompt_length, seq.sampling)
    regions = policy and policy.regions_by_group(seq)

    def blocks(length: int) -> int:
        return blocks_alone(config, regions, seq.prompt_length, length - 1)  # the last token is never stored

    needed = blocks(seq.max_length)
    if needed <= config.num_blocks:
        return seq.max_length
    shortest = seq.prompt_length + max(1, seq.sampling.min_tokens)
    if seq.sampling.max_tokens is not None or blocks(shortest) > config.num_blocks:
        raise RequestError(
            f"a prompt of {seq.prompt_length} tokens with output up to {seq.max_length} tokens in all needs "
            f"{needed} KV blocks of {config.block_size} tokens, the pool has {config.num_blocks}: "
            f"shorten the prompt, lower max_tokens, or give the pool more memory"
        )
    return bisect_right(range(seq.max_length), config.num_blocks, shortest, key=blocks) - 1
