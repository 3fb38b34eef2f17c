"""Windows of each sequence whenever its tail fills one: for experiments."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import ClassVar

from kvllm.compression.specs import Compresses
from kvllm.config import CompressionConfig, require
from kvllm.core.policies.base import Candidate, EngineLoad
from kvllm.core.policies.windows import WindowOptions, WindowPolicy
from kvllm.core.regions import Regions, Windows
from kvllm.core.sequence import Sequence


class Standalone(WindowOptions, frozen=True, tag="standalone"):
    """Each sequence compresses whenever its tail fills a window; with `block_size=1`. Options as `WindowOptions`."""

    compresses: ClassVar[Compresses] = "overlapping windows"

    def regions(self, config: CompressionConfig, block_size: int, retain: int | None = None) -> Regions:
        """The buffer of a window is the beginning of the next one (paper, section 4.1)."""
        kept = self._retained(config, block_size) if retain is None else retain
        require(block_size == 1, "block_size", block_size, 'policy="standalone" moves by single KV pairs: use 1')
        return Windows(block_size, self.window_blocks, kept, overlap=config.buffer)


class StandalonePolicy(WindowPolicy[Standalone]):
    """Kara without a serving clock (paper, section 4.1): a sequence compresses whenever its tail fills a window.

    The buffer of a window is the beginning of the next, so windows advance by `window - buffer` tokens.
    """

    options_type = Standalone
    at_once = True

    def select(self, decoding: Sequences[Sequence], load: EngineLoad) -> list[Candidate]:
        return self.eligible(decoding)
