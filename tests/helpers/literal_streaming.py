"""What StreamingLLM leaves of a cache that is cut to a budget."""

from __future__ import annotations


def streaming_cache(prompt: int, output: int, budget: int, gap: int, protected: int) -> list[list[int]]:
    """By row of the output but the last, the positions that StreamingLLM leaves it to attend."""
    cached, visible = list(range(prompt)), []
    for position in range(prompt, prompt + output - 1):
        if len(cached) >= budget + gap:
            whole, rest = cached[:protected], cached[protected:]
            cached = [*whole, *rest[:4], *rest[len(rest) - (budget - protected - 4) :]]
        cached.append(position)
        visible.append(list(cached))
    return visible
