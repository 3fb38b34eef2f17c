"""The server's routes, as clients see them: bodies of requests, and what their answers say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvllm.errors import EngineDeadError, RequestError
from tests.deterministic.scenario import TEXT_ROUTES, Arrival

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PATHS |= {name: f"/v1/{name}" for name in TEXT_ROUTES}
REASONS = {"end_turn": "stop", "max_tokens": "length", "completed": "stop", "incomplete": "length"}


class Piece(NamedTuple):
    """What is new of a completion: its tokens, or where a route shows none, its text; at its end, the reason."""

    index: int = 0
    tokens: Sequence[int] = ()
    text: str = ""
    reason: str | None = None
    error: BaseException | None = None


def body_of(arrival: Arrival, content: str, most: int) -> bytes:
    """content: of the message, for a route that takes one. most: tokens that there is room for."""
    unknown = ("compress", "logprobs", "max_tokens")
    sampling = {key: value for key, value in arrival.sampling.items() if key not in unknown}
    length = min(arrival.sampling["max_tokens"], most)
    body: dict[str, Any] = {
        "model": arrival.adapter or "model",
        "priority": arrival.priority,
        "stream": arrival.via == "stream",
    }
    if arrival.salt:
        body["cache_salt"] = arrival.salt
    messages = [{"role": "user", "content": content}]
    if arrival.route == "completions":
        body |= {"prompt": arrival.prompt, "max_tokens": length, "return_token_ids": True, **sampling}
    elif arrival.route == "chat":
        body |= {"messages": messages, "max_tokens": length, "return_token_ids": True, **sampling}
    elif arrival.route == "messages":
        body |= {"messages": messages, "max_tokens": length, "temperature": 0.0}
    else:
        body |= {"input": content, "max_output_tokens": length, "temperature": 0.0}
    return json.dumps(body).encode()


def read_answer(arrival: Arrival, status: int, written: bytes) -> Iterator[Piece]:
    """What an answer says, as far as it came."""
    if status != 200:
        kind = EngineDeadError if status == 503 else RequestError
        yield Piece(error=kind(f"{status}: {written.decode()}"))
        return
    streams = arrival.via == "stream"
    lines = [line[6:] for line in written.decode().split("\n") if line.startswith("data: ")]
    for text in lines if streams else [written]:
        if text == "[DONE]":
            continue
        answer = json.loads(text)
        if error := answer.get("error"):
            is_dead = error.get("code") == 503 or error.get("type") == "overloaded_error"
            yield Piece(error=(EngineDeadError if is_dead else RequestError)(error["message"]))
        elif arrival.route not in TEXT_ROUTES:
            for choice in answer.get("choices", ()):
                yield Piece(choice["index"], choice.get("token_ids") or (), reason=choice["finish_reason"])
        else:
            yield _of_event(answer) if streams else _of_whole(answer)


def _of_whole(answer: dict[str, Any]) -> Piece:
    """Of the answer of a route of TEXT_ROUTES."""
    blocks = answer["content"] if answer.get("type") == "message" else answer["output"]
    if answer.get("type") != "message":
        blocks = [part for block in blocks for part in block["content"]]
    reason = answer.get("stop_reason") or answer.get("status")
    return Piece(text="".join(block["text"] for block in blocks), reason=REASONS[str(reason)])


def _of_event(event: dict[str, Any]) -> Piece:
    kind = event["type"]
    if kind == "content_block_delta":
        return Piece(text=event["delta"]["text"])
    if kind == "message_delta":
        return Piece(reason=REASONS[event["delta"]["stop_reason"]])
    if kind == "response.output_text.delta":
        return Piece(text=event["delta"])
    if kind in ("response.completed", "response.incomplete"):
        return Piece(reason=REASONS[event["response"]["status"]])
    return Piece()
