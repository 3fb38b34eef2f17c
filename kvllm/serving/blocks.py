"""A message as blocks of thought, text and calls, one behind the other, as /v1/responses and /v1/messages show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec import UNSET

from kvllm.serving.message_parser import MessagePart

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A part of a message. text: of a call, the JSON of its arguments. call_id, name: of a call."""

    index: int
    kind: Kind
    text: str = ""
    call_id: str = ""
    name: str = ""


class BlockStep(NamedTuple):
    """What happens to a block. text: what is new of it, in a delta."""

    what: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""


class BlockWriter:
    """Puts the pieces of one message into blocks, of which one at a time is open."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    def push(self, part: MessagePart) -> list[BlockStep]:
        """What a piece does to the blocks."""
        steps: list[BlockStep] = []
        if part.reasoning:
            steps += self._write("reasoning", part.reasoning)
        if part.content:
            steps += self._write("text", part.content)
        for call in part.tool_calls:
            if call.id is not UNSET and call.function.name is not UNSET:
                steps += self._start(Block(len(self.blocks), "call", "", call.id, call.function.name))
            steps += self._write("call", call.function.arguments)
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

    def _write(self, kind: Kind, text: str) -> list[BlockStep]:
        is_open = self._is_open and self.blocks[-1].kind == kind
        steps = [] if is_open else self._start(Block(len(self.blocks), kind))
        block = self.blocks[-1]
        block.text += text
        return [*steps, BlockStep("delta", block, text)] if text else steps
