"""Requests to the application itself, without a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any


async def ask(app: Any, path: str, body: Any = None) -> tuple[int, bytes]:
    """Status and body of the application's answer."""
    content = b"" if body is None else json.dumps(body).encode()
    received = [{"type": "http.request", "body": content, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if received:
            return received.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    method = "GET" if body is None else "POST"
    await app(
        {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
        },
        receive,
        send,
    )
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)
