"""Routes of the live page: its files, its stream of samples, and one request to look into or to cancel."""

from __future__ import annotations

import asyncio
import gzip
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from kvllm.core.regions import Region
from kvllm.core.spans import Span, kept_spans
from kvllm.serving import live
from kvllm.serving.context import context_of
from kvllm.serving.errors import ApiError
from kvllm.serving.sse import EventStream
from kvllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvllm.engine_builder import Engine

FOLDER = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""No script, style, host or frame but the page's own; text that became markup would run nothing."""
MOST_TEXT_TOKENS = 4000
"""Of a prompt and of an output, the last tokens whose text is shown."""


class SequenceDetail(Struct):
    """One sequence of a request that was opened.

    spans: positions from `start` to `end`, `kept` of whose KV pairs are left; all positions computed so far, in order.
    prompt, output: the end of the texts; None unless the viewer's key is that of the request.
    """

    index: int
    prompt_tokens: int
    output_tokens: int
    spans: list[Span]
    prompt: str | None
    output: str | None


class RequestDetail(Struct):
    """A request that was opened.

    is_own: whether the viewer may read and cancel it.
    sequences: the unfinished ones. None are left when the request has ended, and an unknown one has none.
    """

    id: str
    is_own: bool
    sequences: list[SequenceDetail]


class _Sequence(Struct):
    """What is read of a sequence in the engine's thread."""

    index: int
    tenant: str
    prompt_length: int
    token_ids: list[int]
    logical_length: int
    compressions: list[Region]


@cache
def _files() -> dict[str, tuple[bytes, bytes]]:
    """The content of each file by its name, as it is and compressed: no path of a request reaches the file system."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in TYPES}
    return {name: (content, gzip.compress(content)) for name, content in files.items()}


async def file(request: Request) -> Response:
    """The page itself, or a script, style or picture of it. They hold no data, so they need no key. Raises ApiError."""
    name = request.path_params.get("name", "index.html")
    if (found := _files().get(name)) is None:
        raise ApiError(404, "the page has no such file")
    takes_gzip = "gzip" in request.headers.get("accept-encoding", "")
    headers = {**HEADERS, "Vary": "Accept-Encoding", **({"Content-Encoding": "gzip"} if takes_gzip else {})}
    return Response(found[takes_gzip], headers=headers, media_type=TYPES[Path(name).suffix])


async def events(request: Request) -> EventStream:
    """Samples as they are taken; the first event has those of the last 15 minutes."""
    context = context_of(request)
    return EventStream(partial(live.write_events, context.state, context.tenant))


async def open_request(request: Request) -> Response:
    """What is left of each window of a request's KV pairs, and its text for its owner."""
    state, request_id = context_of(request).state, request.path_params["id"]
    sequences, is_own = await _find(request)
    work = partial(_detail, request_id, is_own, sequences, state.llm.tokenizer if is_own else None)
    body = await asyncio.get_running_loop().run_in_executor(state.pool, work)
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


async def cancel_request(request: Request) -> Response:
    """End a request; its client gets what there is, with `finish_reason="abort"`. One that has ended stays as it is."""
    sequences, is_own = await _find(request)
    if sequences and not is_own:
        raise ApiError(403, "the request belongs to another key: only that one may cancel it")
    if is_own:
        await context_of(request).state.llm.abort(request.path_params["id"])
    return Response(status_code=204)


async def _find(request: Request) -> tuple[list[_Sequence], bool]:
    """The unfinished sequences of the request that is looked into, and whether they are of the viewer's own key."""
    context = context_of(request)
    sequences = await context.state.llm.inspect(partial(_read, request.path_params["id"]))
    return sequences, bool(sequences) and sequences[0].tenant == context.tenant


def _read(request_id: str, engine: Engine) -> list[_Sequence]:
    return [
        _Sequence(
            seq.index, seq.tenant, seq.prompt_length, seq.token_ids[:], engine.num_computed(seq), seq.compressions[:]
        )
        for seq in engine.outputs.sequences(request_id)
    ]


def _detail(request_id: str, is_own: bool, sequences: list[_Sequence], tokenizer: Tokenizer | None) -> bytes:
    """The answer as JSON. tokenizer: None for no text."""
    detail = RequestDetail(request_id, is_own, [])
    for seq in sequences:
        prompt, output = seq.token_ids[: seq.prompt_length], seq.token_ids[seq.prompt_length :]
        detail.sequences.append(
            SequenceDetail(
                seq.index,
                seq.prompt_length,
                len(output),
                kept_spans(seq.compressions, seq.logical_length),
                _text(tokenizer, prompt),
                _text(tokenizer, output),
            )
        )
    return msgspec.json.encode(detail)


def _text(tokenizer: Tokenizer | None, token_ids: list[int]) -> str | None:
    return None if tokenizer is None else tokenizer.decode(token_ids[-MOST_TEXT_TOKENS:])
