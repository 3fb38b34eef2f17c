"""A dead engine is replaced, while requests are answered with 503."""

from __future__ import annotations

import asyncio
import logging
import time

from kvllm.async_llm import AsyncLLM
from kvllm.serving.state import ServerState

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
MOST_RESTARTS = 3
PERIOD_SECONDS = 600.0


class EngineSupervisor:
    """Looks after the engine of a server.

    More than MOST_RESTARTS within PERIOD_SECONDS would be the same failure over and over: `watch` ends then, for the
    process to end and whoever started it to see.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._restarts: list[float] = []

    async def watch(self) -> None:
        """Replace the engine whenever it has died. Returns when that is of no use any more."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._state.llm.errored and not await self._restart():
                return

    async def _restart(self) -> bool:
        now, dead = time.monotonic(), self._state.llm
        logger.error("%s", dead.dead_error, exc_info=dead.dead_error.__cause__)
        self._restarts = [then for then in self._restarts if now - then < PERIOD_SECONDS]
        if len(self._restarts) >= MOST_RESTARTS:
            logger.error("the engine has failed %d times in %.0f s: the server ends", MOST_RESTARTS + 1, PERIOD_SECONDS)
            return False
        self._restarts.append(now)
        await asyncio.to_thread(dead.shutdown)  # its memory is needed
        try:
            self._state.engine = await asyncio.to_thread(AsyncLLM.from_engine_args, self._state.args)
        except Exception:
            logger.exception("the engine cannot be started again: the server ends")
            return False
        logger.warning("the engine was started again")
        return True
