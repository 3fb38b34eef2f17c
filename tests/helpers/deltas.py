"""Deltas of requests, put together again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvllm.outputs import RequestOutput


async def collect(items: AsyncIterator[RequestOutput], seconds: float = 0.0) -> RequestOutput:
    """The deltas of a request as one output, read with a pause after each."""
    whole = None
    async for delta in items:
        if whole is None:
            whole = delta
        else:
            append(whole, delta)
        await asyncio.sleep(seconds)
    assert whole is not None and whole.finished
    whole.outputs.sort(key=lambda completion: completion.index)
    return whole


def append(whole: RequestOutput, delta: RequestOutput) -> None:
    assert not whole.finished
    whole.finished, whole.error = delta.finished, delta.error
    known = {completion.index: completion for completion in whole.outputs}
    for new in delta.outputs:
        if new.index not in known:
            whole.outputs.append(new)
            continue
        old = known[new.index]
        assert old.finish_reason is None
        old.text += new.text
        old.token_ids += new.token_ids
        old.cumulative_logprob = new.cumulative_logprob
        if old.logprobs is not None:
            old.logprobs += new.logprobs
        old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
