"""What a waiting sequence needs to start, and what it must leave to those that run."""

from __future__ import annotations

from collections.abc import Iterable

from kvllm.config import EngineConfig
from kvllm.core.block_manager import BlockManager, PrefixHit
from kvllm.core.compression_planner import CompressionPlanner
from kvllm.core.offloading import Offloading
from kvllm.core.sequence import Sequence

RESERVE = 0.05
"""Share of the expected growth of running sequences that admission leaves free. Simulated where the pool holds half of
the demand: 1.07 times the tokens per second on a CPU (1.02 by pressure), 0.99 on a GPU (1.02), where a preempted
sequence costs little. Of a tenth, 1.09 (1.03) and 0.98 (1.02)."""
FADING = 0.99
"""What an ended sequence counts in the expectation, after each other one that ends."""


class Admission:
    """Counts blocks for the scheduler that holds it: those of a prefill, and those that running sequences will take.

    What is projected is the pool after compression: a sequence grows until it has a window to compress, and later by
    what stays of its windows. It is expected to generate such a share of its `max_tokens` as those that ended did.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        planner: CompressionPlanner | None,
        offloading: Offloading | None,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.planner = planner
        self.offloading = offloading
        self._low = int(config.watermark * config.num_blocks)
        self._generated = self._allowed = 0.0  # tokens of sequences that have ended, the last ones above all

    def ended(self, seq: Sequence) -> None:
        """A sequence has ended: others are expected to end like it, unless it never ran."""
        if not seq.num_generated:
            return
        self._generated = FADING * self._generated + seq.num_generated
        self._allowed = FADING * self._allowed + seq.max_length - seq.prompt_length

    def may_begin(self, seq: Sequence, hit: PrefixHit, tokens: int) -> bool:
        """Whether a step with so many tokens left has room for a chunk of a sequence; for all of its prompt, where
        chunks are not wanted and some step has that room."""
        prefill = seq.num_uncomputed - hit.num_blocks * self.config.block_size
        return self.config.enable_chunked_prefill or tokens >= min(prefill, self.config.max_num_batched_tokens)

    def needed_blocks(self, seq: Sequence, hit: PrefixHit) -> int:
        """Available blocks that the prefill of a sequence takes, or its cache that is on the host. Those of `hit` are
        found in the pool."""
        if seq.host_tables is not None:
            return self.blocks.blocks_to_restore(seq, hit)
        return self.blocks.blocks_to_admit(seq, self._peak_blocks(seq), self.config.max_num_batched_tokens, hit)

    def spare_blocks(self, seq: Sequence, growth: float) -> int:
        """Blocks to leave free beside others that run, and grow by `growth` blocks."""
        return self._low + int(growth) + seq.forks_pending  # each fork will copy the block that it writes first

    def growth(self, sequences: Iterable[Sequence]) -> float:
        """Blocks to leave to sequences: of each, half of what it adds before it has a window to compress, as windows of
        different ones are at different points, or its part of RESERVE, if that is more."""
        return sum(max(self._until_window(seq) / 2, RESERVE * self._until_end(seq)) for seq in sequences)

    def _until_window(self, seq: Sequence) -> int:
        return self.planner.growth(seq) if self.planner else 0

    def _until_end(self, seq: Sequence) -> int:
        """Blocks that stay of the output that is expected still."""
        if not self._generated:
            return 0
        logical = max(seq.logical_length, seq.prompt_length)
        tokens = int(self._generated / self._allowed * (seq.max_length - 1 - logical))
        stay = self.planner.policy.regions_of(seq).staying(tokens) if self.planner else tokens
        return self.blocks.growth(seq, logical + stay)

    def match_prefix(self, seq: Sequence) -> PrefixHit:
        """Cached blocks that a sequence may start from.

        The last token is always computed, for its logits. Where output is compressed on the way in, the last one of the
        prompt is, so that a chunk ends there and the prompt is compressed first, if it may be. A prompt whose log
        probabilities are asked for is computed whole. One whose cache is on the host shares what is still in the pool.
        """
        if seq.host_tables is not None:
            return self.blocks.match_unchanged(seq)
        if seq.sampling.prompt_logprobs is not None and not seq.num_generated:
            return self.blocks.no_hit
        limit = seq.prompt_length if self.refills_compressed(seq) else seq.num_tokens
        hit = self.blocks.match_prefix(seq, limit - 1)
        return self.offloading.match(seq, hit, limit - 1) if self.offloading else hit

    def chunk(self, seq: Sequence, budget: int) -> int:
        """Tokens of the next chunk: those left, within the budget, and never past a point of compression, or of a
        snapshot of recurrent states."""
        num_tokens = min(seq.num_uncomputed, budget)
        if self.planner is not None and seq.is_prefilling:
            num_tokens = self.planner.chunk(seq, num_tokens)
        return self.blocks.snapshots.chunk(seq, num_tokens) if self.blocks.snapshots else num_tokens

    def refills_compressed(self, seq: Sequence) -> bool:
        """Whether a preempted sequence's output is compressed on its way in, window by window."""
        return self.planner is not None and self.planner.refills_compressed(seq)

    def _peak_blocks(self, seq: Sequence) -> int:
        """Most blocks that the prefill of `seq` holds at once in the layers that attend all tokens."""
        if self.planner is None or not self.planner.refills_compressed(seq):
            return self.blocks.full_parts * self.blocks.blocks_for(seq.num_tokens)
        return self.planner.peak_blocks(seq, seq.num_tokens)
