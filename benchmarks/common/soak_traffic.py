"""Clients of many kinds for one server: short and long requests, streams that are left, cancelled and refused ones."""

from __future__ import annotations

import asyncio
import random
import re
import string
from collections import Counter
from typing import Any

import aiohttp

DONE = b"data: [DONE]"
CANCELLED = "client gone"
SHARED_PREFIXES = 8
VOCABULARY = 160
"""Ids below this are tokens of the package's model."""
ROW_ID = re.compile(r'"id":"([^"]+)"')
REFERENCE = {
    "prompt": "words: d3,f9,Y0,x9\n#>d+f=k\nk>k-Y=Q\nQ>?Q,k,f\n",
    "max_tokens": 120,
    "temperature": 0,
    "ignore_eos": True,
    "compression": {"compress": False},
}


class Traffic:
    """Users that send one request after the other until `stop`.

    outcomes: requests by kind and status; the status of one that its client gave up is CANCELLED.
    wrong: what should not be: errors of the server, streams that break off, tokens that differ.
    """

    def __init__(self, url: str, keys: list[str], reference_key: str, seed: int) -> None:
        self.url = url
        self.keys = keys
        self.reference_key = reference_key  # of its own: the users of the others cancel requests
        self.rng = random.Random(seed)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []
        self.references = 0
        self._expected: str | None = None
        self._stopping = False
        self._prefixes = [self._tokens(self.rng.randint(16, 128)) for _ in range(SHARED_PREFIXES)]

    def stop(self) -> None:
        self._stopping = True

    async def run(self, users: int) -> None:
        """Run until `stop`, and until the requests in flight have ended."""
        async with aiohttp.ClientSession(self.url, connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(self._reference_user(session), *(self._user(session) for _ in range(users)))

    async def _user(self, session: aiohttp.ClientSession) -> None:
        """Busy times and pauses follow each other."""
        while not self._stopping:
            for _ in range(self.rng.randint(1, 12)):
                if not self._stopping:
                    await self._one(session)
            await asyncio.sleep(self.rng.expovariate(1.0))

    async def _one(self, session: aiohttp.ClientSession) -> None:
        kinds = {
            "completion": (self._completion, 50),
            "stream": (self._stream, 30),
            "left": (self._left, 20),
            "cancelled": (self._cancel, 3),
            "tokenize": (self._tokenize, 5),
            "refused": (self._refused, 5),
            "information": (self._information, 3),
        }
        (kind,) = self.rng.choices(list(kinds), [weight for _, weight in kinds.values()])
        headers = {"Authorization": f"Bearer {self.rng.choice(self.keys)}"}
        try:
            status = await kinds[kind][0](session, headers)
        except (aiohttp.ClientError, TimeoutError) as error:
            status = type(error).__name__
            self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
        self.outcomes[kind, str(status)] += 1

    # Kinds of requests. Each returns a status.

    async def _completion(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int:
        body = self._body()
        async with session.post("/v1/completions", json=body, headers=headers) as answer:
            return self._check(answer.status, await answer.read(), allowed=(200, 503))

    async def _stream(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int:
        body = {**self._body(), "stream": True, "stream_options": {"include_usage": True}}
        async with session.post("/v1/completions", json=body, headers=headers) as answer:
            content = await answer.read()
            if answer.status == 200 and not content.rstrip().endswith(DONE):
                self.wrong.append(f"a stream ended with {content[-200:]!r}")
            if b'data: {"error"' in content:
                self.wrong.append(f"a stream has an error: {content[-300:]!r}")
            return self._check(answer.status, content, allowed=(200, 503))

    async def _left(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int | str:
        """The client goes away after a while, from a stream or from an answer that it waits for."""
        body = {**self._body(), "stream": self.rng.random() < 0.5, "max_tokens": 600}
        try:
            async with asyncio.timeout(self.rng.uniform(0, 2)):
                async with session.post("/v1/completions", json=body, headers=headers) as answer:
                    return self._check(answer.status, await answer.read(), allowed=(200, 503))
        except TimeoutError:
            return CANCELLED

    async def _cancel(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int:
        """A request of anybody, as the live page names it; only its own key may."""
        async with session.get("/live/events", headers=headers) as events:
            await events.content.readuntil(b"\n\n")  # those of the last minutes, without requests
            line = (await events.content.readuntil(b"\n\n")).decode()
        if not (found := ROW_ID.findall(line)):
            return 404
        async with session.delete(f"/live/requests/{self.rng.choice(found)}", headers=headers) as answer:
            return self._check(answer.status, await answer.read(), allowed=(204, 403))

    async def _tokenize(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int:
        prompt = "".join(self.rng.choices(string.digits, k=self.rng.randint(1, 20_000)))
        async with session.post("/tokenize", json={"prompt": prompt}, headers=headers) as answer:
            return self._check(answer.status, await answer.read(), allowed=(200, 400))

    async def _refused(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int:
        wrong = {"temperature": -1}, {"n": 1000}, {"prompt": [10**9]}, {"structured_outputs": {"regex": "("}}
        body = {**self._body(), **self.rng.choice(wrong)}
        async with session.post("/v1/completions", json=body, headers=headers) as answer:
            return self._check(answer.status, await answer.read(), allowed=(400, 503))

    async def _information(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int:
        path = self.rng.choice(("/metrics", "/health", "/load", "/v1/models", "/openapi.json"))
        async with session.get(path, headers=headers) as answer:
            return self._check(answer.status, await answer.read(), allowed=(200,))

    async def _reference_user(self, session: aiohttp.ClientSession) -> None:
        """The same request again and again, whose text must not depend on what else runs."""
        headers = {"Authorization": f"Bearer {self.reference_key}"}
        while not self._stopping:
            async with session.post("/v1/completions", json=REFERENCE, headers=headers) as answer:
                if self._check(answer.status, await answer.read(), allowed=(200, 503)) == 200:
                    text = (await answer.json())["choices"][0]["text"]
                    self._expected = self._expected or text
                    self.references += 1
                    if text != self._expected:
                        self.wrong.append(f"the reference has another text: {text!r}, not {self._expected!r}")
            await asyncio.sleep(0.5)

    def _check(self, status: int, content: bytes, allowed: tuple[int, ...]) -> int:
        if status not in allowed:
            self.wrong.append(f"status {status}: {content[:300]!r}")
        return status

    # Random requests

    def _tokens(self, length: int) -> list[int]:
        return [self.rng.randrange(3, VOCABULARY) for _ in range(length)]

    def _body(self) -> dict[str, Any]:
        rng = self.rng
        temperature = rng.choice((0.0, 0.7, 1.0))
        body: dict[str, Any] = {
            "prompt": self._prompt(),
            "max_tokens": rng.randint(1, 300),
            "temperature": temperature,
            "top_p": rng.choice((1.0, 0.9)),
            "repetition_penalty": rng.choice((1.0, 1.0, 1.1)),
            "n": rng.choice((1, 1, 1, 2, 4)),
            "priority": rng.choice((0, 0, 0, -1, 5)),
            "ignore_eos": rng.random() < 0.7,
        }
        extras: list[dict[str, Any]] = [
            {"logprobs": 3},
            {"stop": ["1", "?Q"]},
            {"compression": {"compress": False}},
            {"compression": {"retain_blocks": 1}},
            {"echo": True, "logprobs": 1},
            {"structured_outputs": {"regex": "[0-9]{1,40}"}},
            {"structured_outputs": {"choice": ["yes", "no"]}},
            {"cache_salt": "own"},
        ]
        return body | (rng.choice(extras) if rng.random() < 0.4 else {})

    def _prompt(self) -> str | list[int] | list[list[int]]:
        length = min(int(self.rng.lognormvariate(4.5, 1)) + 1, 600)
        kind = self.rng.random()
        if kind < 0.3:
            return "".join(self.rng.choices(string.digits, k=length))
        if kind < 0.4:
            return [self._tokens(length // 2 + 1), self._tokens(length)]
        shared = self.rng.choice(self._prefixes) if kind < 0.7 else []
        return shared + self._tokens(length)
