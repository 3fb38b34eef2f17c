"""Numbers with a unit on the command line: types for argparse.

One letter is as in vLLM: k, m, g and t count in thousands, K, M, G and T in 1024. With a B after it, the letter may be
either: GB is 10^9 bytes, GiB is 2^30.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from decimal import Decimal

MIB, GIB = 1 << 20, 1 << 30
NUMBER = r"(\d*\.?\d+(?:e[+-]?\d+)?)"
SPELLINGS = "24G or 24GiB (2^30 bytes each), 24GB (10^9), or M for millions"


def parse_count(text: str) -> int:
    """An integer, with a unit if it is a large one: 4k is 4000, 4K is 4096."""
    found = re.fullmatch(r"(-?\d+)([kmgKMG]?)", text)
    if not found:
        raise ArgumentTypeError(f"{text!r} is no integer: write 4096, 4K (the same) or 4k (4000)")
    return int(found[1]) * _unit(found[2])


def parse_bytes(text: str) -> int:
    """A number of bytes. One without a unit that is too small to be meant is refused."""
    number, unit = _split(text)
    if not unit and number < MIB:
        raise ArgumentTypeError(f"{text} bytes? write {text}G, {text}M or {text}GB: a size needs its unit")
    return int(number * _unit(unit))


def parse_gib(text: str) -> float:
    """A number of GiB, which is its unit where none is given. One that is too large to be meant is refused."""
    number, unit = _split(text)
    if not unit and number >= MIB:
        raise ArgumentTypeError(f"{text} GiB? a number without a unit counts GiB: write {SPELLINGS}")
    return float(number * _unit(unit) / GIB) if unit else float(number)


def _split(text: str) -> tuple[Decimal, str]:
    found = re.fullmatch(rf"{NUMBER}\s*((?:[kmgt](?:i?b)?)?)", text, re.IGNORECASE)
    if not found:
        raise ArgumentTypeError(f"{text!r} is no size: write {SPELLINGS}")
    return Decimal(found[1]), found[2]


def _unit(name: str) -> int:
    """Of "", "k", "K", "GB", "GiB" and their kin."""
    if not name:
        return 1
    letter, rest = name[0], name[1:].lower()
    binary = rest == "ib" or (not rest and letter.isupper())
    return (1024 if binary else 1000) ** ("kmgt".index(letter.lower()) + 1)
