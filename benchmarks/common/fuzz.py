"""Random requests that no client should send: broken HTTP, and bodies of wrong types and absurd sizes."""

from __future__ import annotations

import json
import random
from typing import Any

from msgspec import structs

from benchmarks.common import raw_http
from kvllm.serving.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

ROUTES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "AB=", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "AB="}], "max_tokens": 3},
    "/tokenize": {"prompt": "AB="},
    "/detokenize": {"tokens": [3, 4]},
}
EXPLODING: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": "(((a?){30}){30}){30}"}},
    {"structured_outputs": {"regex": "(a|aa|aaa)*" * 200}},
    {"structured_outputs": {"choice": ["x" * 5000] * 200}},
    {"structured_outputs": {"grammar": "start: " + " ".join(f"r{i}" for i in range(3000))}},
    {"structured_outputs": {"json": {"type": "string", "pattern": "(((a?){30}){30}){30}"}}},
    {"structured_outputs": {"json": {"type": "array", "maxItems": 10**9, "items": {"enum": list(range(5000))}}}},
    {"structured_outputs": {"json": {"$ref": "#"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"allOf": [{"$ref": "#"}] * 50}}}},
)
"""Rules whose automata, or whose compilation, grow without an end."""


def wire(rng: random.Random) -> bytes:
    """Bytes of a request that is broken somewhere, or of none at all."""
    path = rng.choice(list(VALID))
    body = json.dumps(VALID[path]).encode()
    head = raw_http.head(path)
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    kinds = (
        lambda: rng.randbytes(rng.randint(1, 2000)),
        lambda: whole[: rng.randrange(len(whole))],
        lambda: _mutated(rng, whole),
        lambda: head + b"Content-Length: %d\r\n\r\n" % rng.choice((0, 1, len(body) - 3, len(body) + 50)) + body,
        lambda: head + b"Content-Length: %s\r\n\r\n" % rng.choice((b"-1", b"x", b"9" * 30, b"1e3", b"")) + body,
        lambda: head + b"Content-Length: 5\r\nContent-Length: 9\r\n\r\n" + body,
        lambda: head + b"Transfer-Encoding: chunked\r\n\r\n" + _chunks(rng, body),
        lambda: head + b"Transfer-Encoding: %s\r\n\r\n" % rng.choice((b"gzip", b"x, chunked", b"chunked, x")) + body,
        lambda: head + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n" + body,
        lambda: head + b"X: " + b"a" * rng.choice((60_000, 70_000, 400_000)) + b"\r\n\r\n",
        lambda: head + b"X: y\r\n" * rng.choice((1000, 30_000)) + b"\r\n",
        lambda: b"GET /" + rng.randbytes(rng.randint(1, 300)).hex().encode() * 50 + b" HTTP/1.1\r\n\r\n",
        lambda: (
            b"%s / HTTP/%s\r\nHost: x\r\n\r\n" % (rng.choice((b"GET", b"PRI", b"\xff")), rng.choice((b"0.9", b"7")))
        ),
        lambda: head.replace(b"\r\n", b"\n") + b"\n" + body,
        lambda: head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
        lambda: b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + rng.randbytes(50),
        lambda: whole * rng.randint(2, 20),
        lambda: b"\x16\x03\x01" + rng.randbytes(300),
    )
    return rng.choice(kinds)()


def _mutated(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _chunks(rng: random.Random, body: bytes) -> bytes:
    length = rng.choice((b"%x" % len(body), b"%x" % (len(body) + 9), b"-1", b"zz", b"f" * 40, b"0" * 5000 + b"1"))
    return length + b"\r\n" + body + rng.choice((b"\r\n0\r\n\r\n", b"0\r\n", b"", b"\r\n1\r\n"))


def body(rng: random.Random) -> tuple[str, bytes]:
    """A route, and a body for it in which some fields have random values, of the right type or of wrong ones."""
    path = rng.choice(list(ROUTES))
    fields = [field.encode_name for field in structs.fields(ROUTES[path])]
    content = dict(VALID[path])
    for name in rng.sample(fields, min(len(fields), rng.choice((1, 1, 1, 2, 4)))):
        content[name] = _value(rng, depth=3)
    return path, json.dumps(content, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def _value(rng: random.Random, depth: int) -> Any:
    scalars = (
        *(None, True, False, 0, 1, -1, 2, 3, 20, 128, 1000, 2**31, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e308, 1e-308),
        *(float("nan"), float("inf"), "", "a", "auto", "none", "json_object", "text", "json_schema", "user", "system"),
        *("\x00", "\ud800", "é" * 50, "🙂" * 9, "{{ 7*7 }}", "{% for x in range(10**9) %}{% endfor %}", "../../etc"),
        *("a" * 20_000, "1" * 5000, "http://localhost/x", "%s%n", "'; --", "\u202e", "<|im_start|>", "(a+)+$"),
    )
    if depth == 0 or rng.random() < 0.6:
        return rng.choice(scalars)
    names = ("type", "json", "regex", "choice", "grammar", "role", "content", "function", "name", "schema", "1", "-1")
    if rng.random() < 0.5:
        return {rng.choice(names): _value(rng, depth - 1) for _ in range(rng.randint(0, 4))}
    return [_value(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 5, 300 if depth == 1 else 9)))]
