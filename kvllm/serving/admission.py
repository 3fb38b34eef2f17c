"""Which requests the server takes: none while it drains or its engine is down, and no more than its queue may hold."""

from __future__ import annotations

import asyncio

from kvllm.serving.errors import unavailable


class Admission:
    """Counts of what is in flight, and limits on them. All is used on the event loop.

    max_requests: most completions in flight, waiting or running; each of `n` counts.
    max_tokens: prompt tokens of requests without a first token, at which no request is taken any more.
    in_flight: completions that have not ended.
    prompt_tokens: of the requests that have no token yet.
    rejections: by reason.
    """

    def __init__(self, max_requests: int | None, max_tokens: int | None) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.in_flight = 0
        self.prompt_tokens = 0
        self.is_draining = False
        self.rejections = {"requests": 0, "tokens": 0, "draining": 0}
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, completions: int, prompt_tokens: int) -> None:
        """Count what a request brings. Raises ApiError with status 503 if there is no room for it."""
        self.check_draining()
        if self.max_requests is not None and self.in_flight + completions > self.max_requests:
            self.rejections["requests"] += 1
            in_flight = f"{self.in_flight} completions are in flight and {completions} more were asked for"
            raise unavailable(f"the server is busy: {in_flight}, of {self.max_requests} at most; try again later")
        if self.max_tokens is not None and self.prompt_tokens >= self.max_tokens:
            self.rejections["tokens"] += 1
            waiting = f"{self.prompt_tokens} prompt tokens wait, of {self.max_tokens} at most"
            raise unavailable(f"the server is busy: {waiting}; try again later")
        self.in_flight += completions
        self.prompt_tokens += prompt_tokens
        self._idle.clear()

    def check_draining(self) -> None:
        """Raises ApiError with status 503 if the server is about to stop."""
        if self.is_draining:
            self.rejections["draining"] += 1
            raise unavailable("the server is shutting down: send the request to another one", 5)

    def leave_prefill(self, prompt_tokens: int) -> None:
        """A prompt has its first token, or never gets one."""
        self.prompt_tokens -= prompt_tokens

    def leave(self, completions: int) -> None:
        """Completions have ended."""
        self.in_flight -= completions
        if self.in_flight == 0:
            self._idle.set()

    async def wait_until_idle(self) -> None:
        """Return when nothing is in flight."""
        await self._idle.wait()
