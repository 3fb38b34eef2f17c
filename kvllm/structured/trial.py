"""A process that tries grammars, so that one which explodes harms nobody: `python -m kvllm.structured.trial`.

Messages have the number of their bytes in front, 8 bytes, big-endian. The first one to come is a Vocabulary, each
further one StructuredOutputsParams, as MessagePack. The answer to one is a Verdict. A rule that takes more than its
time or memory ends the process without an answer.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from typing import IO

import msgspec
import numpy as np
from msgspec import Struct, structs

from kvllm.errors import RequestError
from kvllm.structured.compile import Grammars
from kvllm.structured.grammar import to_grammar
from kvllm.structured.token_sets import unpack
from kvllm.structured.vocabulary import Vocabulary
from kvllm.structured_outputs import StructuredOutputsParams

MAX_SECONDS = 1.0
"""Computing time to compile a rule and to follow it for some tokens."""
MAX_BYTES = 2**29
"""Memory beyond that of the vocabulary."""
TRIAL_TOKENS = 64


class Verdict(Struct):
    """error: the reason to refuse a rule. not_enforced: keywords of JSON schemas that are left out."""

    error: str | None = None
    not_enforced: list[str] = []


def send(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(8, "big") + message)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """A message, or None at the end of the stream."""
    length = int.from_bytes(stream.read(8), "big")
    message = stream.read(length) if length else b""
    return message if len(message) == length and length else None


def try_rule(grammars: Grammars, rule: StructuredOutputsParams) -> None:
    """Compile a rule, and follow it along some text that it allows. Raises RequestError."""
    bare = structs.replace(rule, free_end=None, free_start=None)  # a walk would not come to the end of the free part
    if bare != rule:
        grammars.compile(rule)
    matcher, choose = grammars.matcher(bare), random.Random(0)
    eos_token_ids = grammars.vocabulary.eos_token_ids
    output: list[int] = []
    for _ in range(TRIAL_TOKENS):
        token_ids = np.flatnonzero(unpack(matcher.allowed(output)))
        token_ids = token_ids[~np.isin(token_ids, eos_token_ids)]
        if not len(token_ids):
            return
        output.append(int(choose.choice(token_ids)))


def main() -> None:
    os.nice(5)  # steps come first
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    vocabulary = msgspec.msgpack.decode(receive(requests) or b"", type=Vocabulary)
    grammars = Grammars(lambda: vocabulary, vocabulary.eos_token_ids, max_kept=1)
    _ = grammars.tokenizer  # before the limits, which are a rule's
    _limit_memory()
    while message := receive(requests):
        send(answers, msgspec.msgpack.encode(_answer(grammars, message)))


def _answer(grammars: Grammars, message: bytes) -> Verdict:
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # nothing handles its signal, so that it ends the process
    try:
        rule = msgspec.msgpack.decode(message, type=StructuredOutputsParams)
        try_rule(grammars, rule)
        return Verdict(not_enforced=to_grammar(rule, grammars.vocabulary.added_tokens.get).not_enforced)
    except RequestError as error:
        return Verdict(str(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, hard))


if __name__ == "__main__":
    main()
