"""An engine whose workers may be lost and replaced between two steps."""

from __future__ import annotations

from kvllm.core.block_manager import BlockManager
from kvllm.core.engine import LLMEngine
from kvllm.outputs import RequestOutput
from kvllm.worker.executor import WorkersRestarted


class RestartingEngine(LLMEngine):
    """After a restart the running requests are computed again from their tokens: a step that yields nothing."""

    def step(self) -> list[RequestOutput]:
        try:
            return super().step()
        except WorkersRestarted:
            # Nobody owns a block now. But the prefix cache still names blocks, and their content is lost.
            config = self.config
            self.scheduler.blocks = BlockManager(config.num_blocks, config.block_size, config.shares_prefixes)
            return []
