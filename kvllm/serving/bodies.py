"""Bodies of JSON: those of requests, read and decoded within bounds, and those of answers."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvllm.serving.errors import ApiError, bad_request, unavailable

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
CLOSE = {"Connection": "close"}
BODY_SECONDS = 60.0
"""Time in which a body has to arrive."""
SHARED_BODY_BYTES = 256 << 20
"""Of all large bodies that are being read."""
LARGE_BODY_BYTES = 64 << 10
"""A body up to this size is read whatever others there are."""
MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 100_000
"""Lists and objects in a body: an empty one takes 2 bytes of a body and over 60 of memory."""
SMALL_BODY_BYTES = 16 << 10
"""A body up to this size is parsed on the event loop: a thread would take longer to wake up."""
MAX_WHOLE_FLOATS = 64
"""Numbers of a body, or lists of them, that may be written as 10.0 for 10: each takes another look at all fields."""
PLAIN = "identity"
ENCODINGS = {PLAIN: (), "gzip": (31,), "x-gzip": (31,), "deflate": (zlib.MAX_WBITS, -zlib.MAX_WBITS)}
"""Ways to send a body, and zlib's names of their formats: some clients send deflate without the header of zlib."""

# A string that never ends reaches to the end of the body: if it matched nothing, the search would take squared time.
STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
BRACKETS = re.compile(rb"[\[\]{}]")
FLOAT = re.compile(r"got `float` - at `\$(.*)`$")
KEY = re.compile(r" - at `key` in `\$(.*)`$")
STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
PATH = re.compile(r" - at `\$\.?(.*)`$")
T = TypeVar("T")


def json_response(body: Any) -> Response:
    """body: of an answer; bytes are JSON already."""
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(content, media_type="application/json")


class BodyMemory:
    """Bounds the bytes of large bodies in memory, from all clients: many could send 16 MiB and wait with the last one.

    held: bytes of bodies, small ones too, that are being read or decoded.
    """

    def __init__(self) -> None:
        self.held = 0

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """What takes memory for more bytes of a body. All of it is given back at the end. Raises ApiError."""
        size = 0

        def take(more: int) -> None:
            nonlocal size
            size += more
            self.held += more
            if size > LARGE_BODY_BYTES and self.held > SHARED_BODY_BYTES:
                error = unavailable("too many large bodies arrive at once: try again later")
                error.headers.update(CLOSE)
                raise error

        try:
            yield take
        finally:
            self.held -= size


async def read_body(request: Request, take: Callable[[int], None]) -> bytes:
    """The body of a request. take: see `BodyMemory`. Raises ApiError if it is too large or too slow."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise _too_large()
                take(len(part))
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body has not arrived within {BODY_SECONDS:.0f} s", headers=CLOSE) from None
    except ClientDisconnect:
        raise bad_request("the client has gone before its body was complete") from None
    return b"".join(parts)


async def read_json(
    request: Request, decoder: msgspec.json.Decoder[T], pool: ThreadPoolExecutor, memory: BodyMemory
) -> T:
    """The body of a request as `decoder` reads it; in a thread of `pool`, if it is big or compressed.

    Raises ApiError; also for other types than JSON: any page that a browser shows may send those to this machine.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON: send the header 'Content-Type: application/json'")
    encoding = request.headers.get("content-encoding", "").strip().lower() or PLAIN
    if encoding not in ENCODINGS:
        problem = f"Content-Encoding {encoding[:100]!r} is not known: send gzip, deflate or none"
        raise ApiError(415, problem, headers={"Accept-Encoding": "gzip, deflate"})
    with memory.share() as take:
        body = await read_body(request, take)
        if encoding == PLAIN and len(body) <= SMALL_BODY_BYTES:
            return decode(body, decoder)
        return await asyncio.get_running_loop().run_in_executor(pool, decode, body, decoder, encoding)


def inflate(body: bytes, encoding: str) -> bytes:
    """A body without its compression. Raises ApiError for one that is broken, or too large: it is read no further."""
    problem = "it is cut off, or there is something after its end"
    for wbits in ENCODINGS[encoding]:
        inflater = zlib.decompressobj(wbits)
        try:
            inflated = inflater.decompress(body, MAX_BODY_BYTES + 1)
        except zlib.error as error:
            problem = str(error)
            continue
        if len(inflated) > MAX_BODY_BYTES:
            raise _too_large()
        if inflater.eof and not inflater.unused_data:
            return inflated
    raise bad_request(f"the body is not valid {encoding}: {problem}")


def decode(body: bytes, decoder: msgspec.json.Decoder[T], encoding: str = PLAIN) -> T:
    """Raises ApiError for what is no JSON, is nested too deeply or has fields of wrong types.

    encoding: how the body is compressed, out of ENCODINGS.
    """
    if encoding != PLAIN:
        body = inflate(body, encoding)
    body = body.removeprefix(codecs.BOM_UTF8)
    check_depth(body)
    try:
        decoded = decode_fields(body, decoder)
        if logger.isEnabledFor(logging.DEBUG):
            _log_unknown_fields(body, type(decoded))
        return decoded
    except msgspec.ValidationError as error:
        text = str(error)
        found = PATH.search(text)
        raise bad_request(text, found[1] if found else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None


def decode_fields(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Also from clients whose language has one type of numbers, and which write 10.0 for 10.

    Raises msgspec.DecodeError, of which a ValidationError names the place, and UnicodeDecodeError.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if not (FLOAT.search(str(error)) or KEY.search(str(error))):
            raise
        fields, wrong = msgspec.json.decode(body), error
    for _ in range(MAX_WHOLE_FLOATS):
        if not _make_whole(fields, str(wrong)):
            break
        try:
            return msgspec.convert(fields, decoder.type, str_keys=True)
        except msgspec.ValidationError as error:
            wrong = error
    raise _with_key(fields, wrong)


def check_depth(body: bytes) -> None:
    """Raises ApiError if lists and objects are nested deeper than MAX_JSON_DEPTH, or too many."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return
    outside = STRINGS.sub(b"", body)
    containers = outside.count(b"[") + outside.count(b"{")
    if containers > MAX_JSON_CONTAINERS:
        raise bad_request(f"the body has {containers} lists and objects: at most {MAX_JSON_CONTAINERS} are allowed")
    depth = 0
    for bracket in BRACKETS.findall(outside):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_JSON_DEPTH:
            raise bad_request(f"the body nests lists and objects deeper than {MAX_JSON_DEPTH}: flatten it")


def _log_unknown_fields(body: bytes, kind: type) -> None:
    """Name what a body has and the server does not know: as in vLLM, it is ignored."""
    unknown = sorted(set(msgspec.json.decode(body)) - {field.name for field in msgspec.structs.fields(kind)})
    if unknown:
        logger.debug("%s: fields that are ignored: %s", kind.__name__, ascii(unknown)[:500])


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes: send less at a time", headers=CLOSE)


def _make_whole(fields: Any, error: str) -> bool:
    """Make the number that an error names an integer, with all of its list. Returns whether it has no fraction."""
    found = FLOAT.search(error)
    steps = _steps(found[1]) if found else []
    number = _at(fields, steps)
    if not isinstance(number, float) or not number.is_integer():
        return False
    while isinstance(_at(fields, steps[:-1]), list):
        steps.pop()
    if steps:
        _at(fields, steps[:-1])[steps[-1]] = _whole(_at(fields, steps))
    return bool(steps)


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _with_key(fields: Any, error: msgspec.ValidationError) -> msgspec.ValidationError:
    """The error, with the key that is no number if it is about one."""
    found = KEY.search(str(error))
    for key in _at(fields, _steps(found[1])) if found else ():
        try:
            msgspec.convert({key: None}, dict[int, None], str_keys=True)
        except msgspec.ValidationError:
            return msgspec.ValidationError(
                f"The key {key[:100]!r} is no whole number - at `${found[1] if found else ''}`"
            )
    return error


def _steps(path: str) -> list[str | int]:
    return [name or int(index) for name, index in STEP.findall(path)]


def _at(fields: Any, steps: list[str | int]) -> Any:
    for step in steps:
        fields = fields[step]
    return fields
