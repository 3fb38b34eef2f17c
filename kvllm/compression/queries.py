"""Which query tokens a method scores with, and what recomputing them costs. Free of torch.

Keys and values of a window are cached, so its queries come from an extra pass that reads the cache and writes none of
it (Kara paper, appendix C.2). The query tokens do not depend on each other within the pass, because K and V are there
already: any subset can be recomputed exactly (the stride is our addition). Where scores are observed, there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvllm.config import CompressionConfig

PAIRS_PER_TOKEN = 8
"""KV pairs whose scores count as much in the token budget as one token that goes through the model."""
PAIRS_PER_DECODE = 64
"""KV pairs that are scored and chosen from in at most the time of one sequence's decode."""


@dataclass(frozen=True, slots=True)
class QueryTokens:
    """The tokens of a window whose queries are recomputed, or that are repeated.

    recent: the last ones, all of them. stride: of those before, every `stride`-th, counted from their end; 0 for none.
    """

    recent: int
    stride: int

    @staticmethod
    def of(config: CompressionConfig, *, learns: bool = False) -> QueryTokens:
        """learns: of a compression that a method which learns does learn from."""
        if config.spec.learns and not learns:
            return QueryTokens(0, 0)
        if config.spec.repeats:
            return QueryTokens(config.buffer, 1)
        match "none" if config.observes_scores else config.spec.queries:
            case "window":
                return QueryTokens(config.buffer, config.query_stride)
            case "buffer":
                return QueryTokens(config.buffer, 0)
            case "recent":
                return QueryTokens(config.query_window, 0)
            case "none":
                return QueryTokens(0, 0)

    def offsets(self, window: int) -> list[int]:
        """Where they are in a window of that many KV pairs, ascending."""
        before = max(0, window - self.recent)
        strided = range(before - 1, -1, -self.stride) if self.stride else ()
        return [*reversed(strided), *range(before, window)]

    def count(self, window: int) -> int:
        """How many they are in a window of that many KV pairs."""
        recent = min(self.recent, window)
        return recent + (-(-(window - recent) // self.stride) if self.stride else 0)

    def attended(self, window: int) -> int:
        """KV pairs of the window that they attend to, summed over them: each attends to all up to its own."""
        recent = min(self.recent, window)
        before, strided = window - recent, self.count(window) - recent
        of_strided = strided * before - self.stride * strided * (strided - 1) // 2
        return of_strided + recent * before + recent * (recent + 1) // 2


def window_tokens(config: CompressionConfig, size: int, *, learns: bool = False) -> int:
    """Tokens of a step's budget that compressing a window of `size` KV pairs takes: the query tokens, or the KV pairs
    that are scored, if these weigh more. learns: as for `QueryTokens.of`."""
    return max(QueryTokens.of(config, learns=learns).count(size), -(-size // PAIRS_PER_TOKEN))


def windows_beside(config: CompressionConfig, size: int, decodes: int) -> int:
    """Windows of `size` KV pairs that a step may compress beside so many decodes, at least one.

    They take about half as long as the decodes: half as many query tokens, or as many KV pairs as are scored in that
    time. So the time between two tokens stays within 1.5 times its usual length, unless a single window takes longer.
    """
    cost = max(QueryTokens.of(config).count(size), -(-size // PAIRS_PER_DECODE))
    return max(1, decodes // 2 // cost)
