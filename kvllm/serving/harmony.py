"""Harmony, the form of gpt-oss: an answer is several messages, each with a header that names its channel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from kvllm.serving.tags import LONGEST_HEAD, first_tag

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
FUNCTIONS = "functions."


@dataclass(frozen=True)
class Piece:
    """A part of an answer. raw: its text. body: what of it is in the body of a message, or outside of all.

    channel, recipient: of the message that it is in; empty for none.
    """

    raw: str
    body: str = ""
    channel: str = ""
    recipient: str = ""

    @property
    def is_thought(self) -> bool:
        return self.channel == "analysis" and not self.function

    @property
    def function(self) -> str:
        """The function that the message calls."""
        return self.recipient.removeprefix(FUNCTIONS) if self.recipient.startswith(FUNCTIONS) else ""


class State(Enum):
    """Where an answer is. BEGIN: nothing was read, and the prompt may have begun the header."""

    BEGIN = auto()
    OUTSIDE = auto()
    HEADER = auto()
    BODY = auto()


class HarmonyReader:
    """Reads an answer. is_thinking: whether the prompt has opened the body of a thought."""

    def __init__(self, is_thinking: bool = False) -> None:
        self._state = State.BODY if is_thinking else State.BEGIN
        self._channel, self._recipient = "analysis" if is_thinking else "", ""
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are new."""
        rest, self._held = self._held + text, ""
        pieces: list[Piece] = []
        while rest:
            rest = self._read(rest, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back. The beginning of a header, or of the tag after a call, says nothing to anybody."""
        held, self._held = self._held, ""
        is_header = self._state is State.HEADER and (held.startswith((START, CHANNEL)) or _names_function(held))
        return [] if not held or is_header or self._recipient else [self._piece(held, held)]

    def _read(self, rest: str, pieces: list[Piece]) -> str:
        if self._state is State.BEGIN:
            return self._begin(rest)
        if self._state is State.HEADER:
            return self._read_header(rest, pieces)
        tags = ENDS if self._state is State.BODY else TAGS
        place, tag = first_tag(rest, tags)
        if place:
            pieces.append(self._piece(rest[:place], rest[:place]))
        if tag is None:
            self._held = rest[place:]
            return ""
        if tag in (START, CHANNEL):
            self._state = State.HEADER
            return rest[place:]
        pieces.append(self._piece(tag))
        self._leave()
        return rest[place + len(tag) :]

    def _begin(self, rest: str) -> str:
        """The prompt ends with the role, and a recipient may follow."""
        stripped = rest.lstrip()
        if "to=".startswith(stripped[:3]) and len(stripped) < 3:
            self._held = rest
            return ""
        self._state = State.HEADER if stripped.startswith("to=") else State.OUTSIDE
        return rest

    def _read_header(self, rest: str, pieces: list[Piece]) -> str:
        head, tag, _ = rest[:LONGEST_HEAD].partition(MESSAGE)
        if not tag and len(rest) < LONGEST_HEAD:
            self._held = rest
            return ""
        if not tag:
            self._leave()
            pieces.append(self._piece(rest[:LONGEST_HEAD], rest[:LONGEST_HEAD]))
            return rest[LONGEST_HEAD:]
        channel = re.search(rf"{re.escape(CHANNEL)}\s*(\w+)", head)
        recipient = re.search(r"\bto=([\w.\-]+)", head)
        self._channel, self._recipient = channel[1] if channel else "", recipient[1] if recipient else ""
        self._state = State.BODY
        pieces.append(self._piece(head + tag))
        return rest[len(head) + len(tag) :]

    def _leave(self) -> None:
        self._state, self._channel, self._recipient = State.OUTSIDE, "", ""

    def _piece(self, raw: str, body: str = "") -> Piece:
        return Piece(raw, body, self._channel, self._recipient)


def _names_function(header: str) -> bool:
    """Whether a header that is cut off begins with a function, as far as it goes."""
    recipient, begun = f"to={FUNCTIONS}", header.lstrip()
    return recipient.startswith(begun) or begun.startswith(recipient)


class HarmonyReasoningParser:
    """Splits an answer into its thoughts, which stand in the channel `analysis`, and the rest.

    is_open: whether the prompt has opened a thought. keeps_form: whether the rest keeps its headers, for a parser of
    calls after this one.
    """

    def __init__(self, is_open: bool, keeps_form: bool) -> None:
        self._reader = HarmonyReader(is_open)
        self._keeps_form = keeps_form
        self.in_answer = self.has_ended_thought = False

    def push(self, piece: str) -> tuple[str, str]:
        """What is new of the thoughts and of the rest."""
        return self._split(self._reader.push(piece))

    def finish(self) -> tuple[str, str]:
        """What was held back until the end."""
        return self._split(self._reader.finish())

    def _split(self, pieces: list[Piece]) -> tuple[str, str]:
        thoughts = [piece for piece in pieces if piece.is_thought]
        others = [piece for piece in pieces if not piece.is_thought]
        self.has_ended_thought = self.has_ended_thought or any(piece.raw in ENDS for piece in thoughts)
        self.in_answer = self.in_answer or self.has_ended_thought or bool(others)
        rest = "".join(piece.raw if self._keeps_form else piece.body for piece in others)
        return "".join(piece.body for piece in thoughts), rest
