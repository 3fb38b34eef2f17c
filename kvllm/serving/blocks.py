"""A message as blocks of thought, text and calls, one after the other, as /v1/responses and /v1/messages show it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

from msgspec import UNSET

from kvllm.serving.chat_format import MessagePart
from kvllm.serving.protocol import TokenLogprob

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A part of a message. text: of a call, the JSON of its arguments. logprobs: of text. call_id, name: of a call."""

    index: int
    kind: Kind
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)


class BlockStep(NamedTuple):
    """What happens to a block. text, logprobs: what is new of it, in a delta."""

    what: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()


class BlockWriter:
    """Puts the pieces of one message into blocks, of which one at a time is open."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False
        self._held: list[TokenLogprob] = []
        """Of tokens whose text may be held back."""

    def push(self, part: MessagePart, logprobs: Sequence[TokenLogprob] = ()) -> list[BlockStep]:
        """What a piece does to the blocks. logprobs: of the tokens that made it."""
        steps: list[BlockStep] = []
        self._held += logprobs
        if part.reasoning:
            steps += self._write("reasoning", part.reasoning)
        begin, after = 0, part.reasoning
        for call, place in zip(part.tool_calls, part.places, strict=True):
            steps += self._write_text(part.content[begin:place], after)
            begin, after = place, ""
            if call.id is not UNSET and call.function.name is not UNSET:
                steps += self._start(Block(len(self.blocks), "call", "", call.id, call.function.name))
            steps += self._write("call", call.function.arguments)
        steps += self._write_text(part.content[begin:], after)
        if part.tool_calls or (part.reasoning and not part.content):
            self._held = []
        return steps

    def finish(self) -> list[BlockStep]:
        """Close the block that is open."""
        was_open, self._is_open = self._is_open, False
        return [BlockStep("stop", self.blocks[-1])] if was_open else []

    def _start(self, block: Block) -> list[BlockStep]:
        steps = self.finish()
        self.blocks.append(block)
        self._is_open = True
        return [*steps, BlockStep("start", block)]

    def _write_text(self, text: str, after: str) -> list[BlockStep]:
        """Text, and the log probabilities of its tokens, which come after those that make `after`."""
        if not text:
            return []
        own, self._held = _making(text, self._held, after)
        return self._write("text", text, own)

    def _write(self, kind: Kind, text: str, logprobs: Sequence[TokenLogprob] = ()) -> list[BlockStep]:
        is_open = self._is_open and self.blocks[-1].kind == kind
        steps = [] if is_open else self._start(Block(len(self.blocks), kind))
        block = self.blocks[-1]
        block.text += text
        block.logprobs += logprobs
        return [*steps, BlockStep("delta", block, text, logprobs)] if text else steps


def _making(text: str, tokens: Sequence[TokenLogprob], after: str) -> tuple[Sequence[TokenLogprob], list[TokenLogprob]]:
    """Those of some tokens that make a text, and those that come after it. after: what they make before."""
    made = b"".join(bytes(token.bytes) for token in tokens)
    begin = made.find(text.encode(), max(0, made.find(after.encode())) + len(after.encode()))
    if begin < 0:  # a character that could not be decoded
        return tokens, []
    places = list(accumulate((len(token.bytes) for token in tokens), initial=0))
    first, last = bisect_right(places, begin) - 1, bisect_left(places, begin + len(text.encode()))
    return tokens[first:last], list(tokens[last:])
