"""Tool calls in the form of Hermes, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as text arrives."""

from __future__ import annotations

import json
import re
import uuid
from enum import Enum, auto
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from kvllm.serving.tags import unfinished_tag

START, END = "<tool_call>", "</tool_call>"
# The beginning of a call as models write it. From there on its arguments stream; any other order waits for its end.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
LONGEST_HEAD = 1000


class ChatFunctionCall(Struct, kw_only=True):
    """A function's name, and its arguments as JSON text; or what is new of these."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ChatToolCall(Struct, kw_only=True):
    """A call, or what is new of one. index: its number among the message's calls, in a stream."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: ChatFunctionCall


class State(Enum):
    """Where an answer is. END: behind the JSON of a call."""

    TEXT = auto()
    CALL = auto()
    END = auto()


class HermesParser:
    """Splits an answer into text and calls. White space around calls belongs to neither.

    What begins like a call and is none stays text, unless its name was given out already.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._state = State.TEXT
        self._held = ""
        self._call = CallReader()

    def push(self, piece: str) -> tuple[str, list[ChatToolCall]]:
        """What is new of the text and of the calls."""
        rest, self._held = self._held + piece, ""
        texts: list[str] = []
        calls: list[ChatToolCall] = []
        while rest:
            if self._state is State.TEXT:
                rest = self._read_text(rest, texts)
            elif self._state is State.CALL:
                rest = self._read_call(rest, texts, calls)
            else:
                rest = self._read_end(rest)
        return "".join(texts), calls

    def finish(self) -> str:
        """Text held back that has become no call."""
        held, self._held = self._held, ""
        if self._state is State.CALL:
            return "" if self._call.name else START + self._call.raw
        return "" if self._state is State.END or (self.num_calls and held.isspace()) else held

    def _read_text(self, rest: str, texts: list[str]) -> str:
        text, tag, behind = rest.partition(START)
        if tag:
            self._state, self._call = State.CALL, CallReader()
            texts.append(text.rstrip())
            return behind
        kept = len(rest) - unfinished_tag(rest, START)
        kept = len(rest[:kept].rstrip())
        self._held = rest[kept:]
        texts.append(rest[:kept])
        return ""

    def _read_call(self, rest: str, texts: list[str], calls: list[ChatToolCall]) -> str:
        call = self._call
        was_named = call.name is not None
        used = call.push(rest)
        if call.name is not None and not was_named:
            function = ChatFunctionCall(name=call.name)
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            calls.append(ChatToolCall(index=self.num_calls, id=call_id, type="function", function=function))
            self.num_calls += 1
        if arguments := call.take_arguments():
            if was_named:
                calls.append(ChatToolCall(index=self.num_calls - 1, function=ChatFunctionCall()))
            calls[-1].function.arguments = arguments
        if call.object.is_broken and call.name is None:
            self._state = State.TEXT
            texts.append(START + call.raw)
        elif call.object.is_over:
            self._state = State.END
        return rest[used:]

    def _read_end(self, rest: str) -> str:
        stripped = rest.lstrip()
        if END.startswith(stripped[: len(END)]):
            self._state = State.TEXT if stripped.startswith(END) else State.END
            self._held = "" if self._state is State.TEXT else rest
            return stripped[len(END) :]
        self._state = State.TEXT
        return rest


class CallReader:
    """Reads the JSON object of one call.

    raw: its text so far. name: once it is known.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.object = ObjectScanner()
        self._arguments: ObjectScanner | None = None
        self._new_arguments = ""

    def push(self, text: str) -> int:
        """Read on. Returns how many characters of the text belong to the object, all of them unless it is over."""
        used = self.object.push(text)
        new = text[:used]
        self.raw += new
        if self.name is None and len(self.raw) - len(new) < LONGEST_HEAD:
            new = self._read_head()
        if self._arguments is not None:
            self._new_arguments += new[: self._arguments.push(new)]
        elif self.object.is_complete:
            self._read_whole()
        return used

    def take_arguments(self) -> str:
        """The arguments that are new."""
        new, self._new_arguments = self._new_arguments, ""
        return new

    def _read_head(self) -> str:
        """The text behind the head, once it is complete."""
        head = HEAD.match(self.raw[:LONGEST_HEAD])
        if head is None:
            return ""
        name = _decoded(head[1])
        if name is None:
            return ""
        self.name, self._arguments = name, ObjectScanner()
        return self.raw[head.end() :]

    def _read_whole(self) -> None:
        call = _decoded(self.raw)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            self.object.is_broken = True
            return
        self.name, arguments = call["name"], call.get("arguments")
        if isinstance(arguments, str):  # some models write the JSON as a string
            self._new_arguments = arguments
        else:
            self._new_arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)


class ObjectScanner:
    """Finds where a JSON object ends. Of what is inside, it only tells strings from the rest."""

    def __init__(self) -> None:
        self.is_complete = self.is_broken = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.is_broken

    def push(self, text: str) -> int:
        """How many characters belong to the object: all of them, unless it is over."""
        for place, character in enumerate(text):
            if self.is_over:
                return place
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif self._cannot_be(character):
                self.is_broken = True
                return place
            else:
                self._read(character)
        return len(text)

    def _cannot_be(self, character: str) -> bool:
        """Whether a character outside of strings is none of JSON, such as that of a tag behind an unfinished object."""
        return character == "<" or (self._depth == 0 and character not in " \t\r\n{")

    def _read(self, character: str) -> None:
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_complete = self._depth == 0


def _decoded(text: str) -> Any:
    """The value of a JSON text, None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
