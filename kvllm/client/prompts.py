"""Prompts for a load: of random tokens, from a file, or with the lengths of a trace.

Random prompts need no tokenizer here. The server turns common words and characters into token ids, and prompts are
drawn from these. So they have the length that was asked for, and no token with a special meaning.
"""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvllm.client.load import Prompt
from kvllm.errors import ConfigError, ServerError
from kvllm.simulation.workload import Lengths, open_text

WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "with", "as", "was", "on", "be", "by", "at", "this"]
PIECES = [f" {piece}" for piece in (*WORDS, *string.ascii_letters, *string.digits, *string.punctuation)]
TOKENIZED_AT_ONCE = 8


async def tokenize_pieces(session: aiohttp.ClientSession, root: str, model: str) -> dict[str, list[int]]:
    """The token ids of common words and characters, each with a space before it, as the server's /tokenize has them.

    What a small vocabulary lacks is left out. Raises ServerError if nothing is left.
    """
    places = asyncio.Semaphore(TOKENIZED_AT_ONCE)

    async def encode(piece: str) -> list[int]:
        body = {"model": model, "prompt": piece, "add_special_tokens": False}
        async with places, session.post(f"{root}/tokenize", json=body) as response:
            return (await response.json())["tokens"] if response.status == 200 else []

    try:
        found = await asyncio.gather(*map(encode, PIECES))
    except aiohttp.ClientError as error:
        raise ServerError(f"{root} cannot be reached: {error}") from None
    tokens = {piece: ids for piece, ids in zip(PIECES, found, strict=True) if ids}
    if not tokens:
        raise ServerError(
            f"{root}/tokenize gives no tokens: random prompts need them; --dataset-name custom does without"
        )
    return tokens


def random_prompts(
    pieces: Mapping[str, Sequence[int]], lengths: Sequence[Lengths], seed: int, prefix_len: int = 0
) -> list[Prompt]:
    """Prompts of random tokens, of which the first `prefix_len` are the same in all and come on top of the lengths.

    pieces: whose tokens are drawn.
    """
    alphabet = sorted({token for tokens in pieces.values() for token in tokens})
    rng = random.Random(seed)
    prefix = rng.choices(alphabet, k=prefix_len)
    return [
        Prompt(prefix + rng.choices(alphabet, k=length), output_len, prefix_len + length)
        for length, output_len in lengths
    ]


def random_texts(
    pieces: Mapping[str, Sequence[int]], lengths: Sequence[Lengths], seed: int, prefix_len: int = 0
) -> list[Prompt]:
    """As `random_prompts`, as text for chats, which take no token ids. The last piece may go past the length by a few
    tokens, and the chat template adds some; the server's count holds."""
    rng = random.Random(seed)
    prefix = _random_text(rng, pieces, prefix_len)
    return [Prompt(prefix + _random_text(rng, pieces, length), output_len) for length, output_len in lengths]


def _random_text(rng: random.Random, pieces: Mapping[str, Sequence[int]], length: int) -> str:
    names, chosen = list(pieces), []
    while length > 0:
        chosen.append(rng.choice(names))
        length -= len(pieces[chosen[-1]])
    return "".join(chosen)


def prompts_of_file(path: Path, count: int, output_len: int, *, chat: bool) -> list[Prompt]:
    """Read JSONL with `prompt` (text or token ids) or `messages`, and `output_tokens` where lengths differ.

    A shorter file is taken from the beginning again. Raises ConfigError for a file that cannot be read.
    """
    prompts = []
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if len(prompts) == count:
                break
            if line.strip():
                prompts.append(_prompt_of_line(f"{path}, line {number}", line, output_len, chat))
    if not prompts:
        raise ConfigError(f"{path} has no prompt")
    return list(islice(cycle(prompts), count))


def _prompt_of_line(where: str, line: str, output_len: int, chat: bool) -> Prompt:
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where} is no JSON object: {error}") from None
    content = record.get("messages") if chat and "messages" in record else record.get("prompt")
    if not isinstance(content, str | list) or not content:
        fields = '"prompt" (a text) or "messages"' if chat else '"prompt" (a text or token ids)'
        raise ConfigError(f"{where} must have {fields}")
    if chat and "messages" not in record and not isinstance(content, str):
        raise ConfigError(f"{where}: a chat takes no token ids: give a text, or use --endpoint-type completions")
    length = record.get("output_tokens", output_len)
    if not isinstance(length, int) or length < 1:
        raise ConfigError(f'{where}: "output_tokens" is {length!r}; allowed is a number from 1')
    return Prompt(content, length, len(content) if isinstance(content, list) and not chat else 0)
