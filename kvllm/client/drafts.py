"""What a server says of its speculative decoding, before and after a load."""

from __future__ import annotations

from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvllm.stats import DraftCounts

PREFIX = "vllm:spec_decode_num_"


async def read_drafts(session: aiohttp.ClientSession, root: str) -> DraftCounts:
    """The counts since the server started; none of one that has no such metrics."""
    counts = DraftCounts()
    async with session.get(f"{root}/metrics") as response:
        text = await response.text() if response.status == 200 else ""
    by_position: dict[int, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name.startswith(PREFIX) else ():
            name, value = sample.name.removeprefix(PREFIX).removesuffix("_total"), int(sample.value)
            if name == "drafts":
                counts.drafts += value
            elif name == "draft_tokens":
                counts.tokens += value
            elif name == "accepted_tokens_per_pos":
                position = int(sample.labels["position"])
                by_position[position] = by_position.get(position, 0) + value
    counts.right = [by_position[position] for position in sorted(by_position)]
    return counts


def summarize_drafts(before: DraftCounts, after: DraftCounts) -> dict[str, Any]:
    """The fields of the result, with vLLM's names; none where nothing was drafted."""
    drafts, tokens = after.drafts - before.drafts, after.tokens - before.tokens
    if drafts <= 0 or tokens <= 0:
        return {}
    earlier = before.right + [0] * (len(after.right) - len(before.right))
    right = [now - then for now, then in zip(after.right, earlier, strict=True)]
    return {
        "spec_decode_acceptance_rate": 100 * sum(right) / tokens,
        "spec_decode_acceptance_length": 1 + sum(right) / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": sum(right),
        "spec_decode_per_position_acceptance_rates": [each / drafts for each in right],
    }
