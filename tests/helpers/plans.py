"""The forward pass of a plan, one record for each sequence."""

from __future__ import annotations

from typing import NamedTuple

from kvllm.core.protocol import Fork, StepPlan


class Scheduled(NamedTuple):
    """A sequence of the pass. new_tokens: those that come with the plan."""

    seq_id: int
    num_tokens: int
    new_blocks: list[int]
    new_tokens: list[int]
    samples: bool
    forks: list[Fork]


def scheduled_in(plan: StepPlan) -> list[Scheduled]:
    """In the order of the pass."""
    decodes = plan.decodes
    blocks = dict(zip(decodes.grown, decodes.new_blocks, strict=True))
    decoding = [
        Scheduled(seq_id, 1, [blocks.pop(index)] if index in blocks else [], [token_id], True, [])
        for index, (seq_id, token_id) in enumerate(zip(decodes.seq_ids, decodes.token_ids, strict=True))
    ]
    assert not blocks, "blocks of no sequence"
    chunks = [
        Scheduled(each.seq_id, each.num_tokens, each.new_blocks, [], each.samples, each.forks) for each in plan.chunks
    ]
    return decoding + chunks
