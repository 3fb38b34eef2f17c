"""Which query tokens a method scores with, and what recomputing them costs. Free of torch.

Keys and values of a window are cached, so its queries come from an extra pass that reads the cache and writes none of
it (Kara paper, appendix C.2). The query tokens do not depend on each other within the pass, because K and V are there
already: any subset can be recomputed exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvllm.config import CompressionConfig

PAIRS_PER_TOKEN = 8
"""KV pairs whose scores count as much in the token budget as one token that goes through the model."""
PAIRS_PER_DECODE = 64
"""KV pairs that are scored and chosen from in at most the time of one sequence's decode."""


def query_tokens(config: CompressionConfig, size: int) -> int:
    """How many tokens at the end of a window of `size` KV pairs have their queries recomputed, or are repeated."""
    if config.spec.repeats:
        return size
    match config.spec.queries:
        case "window":
            return size
        case "buffer":
            return min(config.buffer, size)
        case "recent":
            return min(config.query_window, size)
        case "none":
            return 0


def window_tokens(config: CompressionConfig, size: int) -> int:
    """Tokens of a step's budget that compressing a window of `size` KV pairs takes: the query tokens, or the KV pairs
    that are scored, if these weigh more."""
    return max(query_tokens(config, size), -(-size // PAIRS_PER_TOKEN))


def windows_beside(config: CompressionConfig, size: int, decodes: int) -> int:
    """Windows of `size` KV pairs that a step may compress beside so many decodes, at least one.

    They take about half as long as the decodes: half as many query tokens, or as many KV pairs as are scored in that
    time. So the time between two tokens stays within 1.5 times its usual length, unless a single window takes longer.
    """
    cost = max(query_tokens(config, size), -(-size // PAIRS_PER_DECODE))
    return max(1, decodes // 2 // cost)
