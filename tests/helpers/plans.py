"""The forward pass of a plan, one record for each sequence."""

from __future__ import annotations

from typing import NamedTuple

from kvllm.core.protocol import Fork, StepPlan


class Scheduled(NamedTuple):
    """A sequence of the pass. new_blocks: by part, empty for none. new_tokens: those that come with the plan.
    draft: the last of its query tokens, which may be wrong."""

    seq_id: int
    num_tokens: int
    new_blocks: list[list[int]]
    new_tokens: list[int]
    samples: bool
    forks: list[Fork]
    draft: list[int] = []  # noqa: RUF012


def scheduled_in(plan: StepPlan) -> list[Scheduled]:
    """In the order of the pass."""
    decodes = plan.decodes
    parts = zip(decodes.grown, decodes.new_blocks, strict=True)
    blocks = [dict(zip(grown, of_part, strict=True)) for grown, of_part in parts]
    decoding = [
        Scheduled(
            seq_id, 1, [[of_part.pop(index)] if index in of_part else [] for of_part in blocks], [token_id], True, []
        )
        for index, (seq_id, token_id) in enumerate(zip(decodes.seq_ids, decodes.token_ids, strict=True))
    ]
    assert not any(blocks), "blocks of no sequence"
    chunks = [
        Scheduled(each.seq_id, each.num_tokens, each.new_blocks, [], each.samples, each.forks) for each in plan.chunks
    ]
    verified = [
        Scheduled(each.seq_id, len(each.token_ids), each.new_blocks, each.token_ids[:1], True, [], each.token_ids[1:])
        for each in plan.verifications
    ]
    return decoding + verified + chunks
