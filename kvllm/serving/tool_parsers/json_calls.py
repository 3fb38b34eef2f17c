"""Calls in JSON: objects with a name and arguments, and arguments after a head that has the name."""

from __future__ import annotations

import json
import re
from collections.abc import Container
from typing import Any

from kvllm.serving.tags import LONGEST_HEAD, first_tag
from kvllm.serving.tool_parsers.base import CallReader

# The beginning of a call as models write it. From there on its arguments stream; any other order waits for its end.
NAME = (
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*'
)
HEAD = re.compile(NAME + r"(?=\{)")
STRING_HEAD = re.compile(NAME + '"')
STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
UNFINISHED_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?\Z")


class ObjectReader(CallReader):
    """Reads the JSON object of one call, with its arguments as an object, or as a string that has the object.

    names: those that a call may have; None for any.
    """

    def __init__(self, names: Container[str] | None = None) -> None:
        super().__init__()
        self._names = names
        self._object = ObjectScanner()
        self._arguments: ObjectScanner | None = None

    def push(self, text: str) -> int:
        used = self._object.push(text)
        new = text[:used]
        self.raw += new
        if self.name is None and len(self.raw) - len(new) < LONGEST_HEAD:
            new = self._read_head()
        if self._arguments is not None:
            self._arguments.push(new)
            self._new_arguments += self._arguments.new
        is_call = self._arguments is not None or not self._object.is_complete or self._read_whole()
        self.is_complete = self._object.is_complete and is_call
        self.is_broken = self._object.is_broken or not is_call
        return used

    def finish(self) -> None:
        """Arguments in a string are given as far as it goes."""
        head = STRING_HEAD.match(self.raw)
        if self.name is None and head is not None and self._set_name(decoded(head[1])):
            inside = STRING.match(self.raw, head.end())
            text = UNFINISHED_ESCAPE.sub(r"\1", inside[0] if inside else "")
            self._new_arguments = clean(decoded(f'"{text}"') or "")

    def _set_name(self, name: Any) -> bool:
        if not isinstance(name, str) or (self._names is not None and name not in self._names):
            return False
        self.name = clean(name)
        return True

    def _read_head(self) -> str:
        """The text after the head, once it is complete."""
        head = HEAD.match(self.raw[:LONGEST_HEAD])
        if head is None or not self._set_name(decoded(head[1])):
            return ""
        self._arguments = ObjectScanner()
        return self.raw[head.end() :]

    def _read_whole(self) -> bool:
        """Whether the object, which is complete, is a call."""
        call = decoded(self.raw)
        if not isinstance(call, dict) or not self._set_name(call.get("name")):
            return False
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):  # some models write the JSON as a string
            self._new_arguments = clean(arguments)
        else:
            self._new_arguments = clean(json.dumps({} if arguments is None else arguments, ensure_ascii=False))
        return True


class HeadedReader(CallReader):
    """Reads a head that has the name, and the arguments in braces after it.

    head: matches all in front of the braces; its group is the name. stops: tags that a head does not have, such as that
    of the next call.
    """

    def __init__(self, head: re.Pattern[str], stops: tuple[str, ...]) -> None:
        super().__init__()
        self._head = head
        self._ends = ("{", *stops)
        self._arguments = ObjectScanner()

    def push(self, text: str) -> int:
        used = 0
        if self.name is None:
            used = self._read_head(text)
            if self.name is None:
                return used
        return used + self._read_arguments(text[used:])

    def _read_head(self, text: str) -> int:
        place, end = first_tag(text, self._ends)
        used = min(place, LONGEST_HEAD - len(self.raw))
        self.raw += text[:used]
        has_end = end is not None and used == place
        if has_end and end == "{" and (head := self._head.fullmatch(self.raw)):
            self.name = head[1]
        else:
            self.is_broken = has_end or len(self.raw) == LONGEST_HEAD
        return used

    def _read_arguments(self, text: str) -> int:
        used = self._arguments.push(text)
        self._new_arguments += self._arguments.new
        self.is_complete, self.is_broken = self._arguments.is_complete, self._arguments.is_broken
        return used


class ObjectScanner:
    """Finds where a JSON object ends. Of what is inside, it only tells strings from the rest.

    new: what the last text has of the object. Line breaks and tabs in strings, which models write, are escaped there.
    """

    def __init__(self) -> None:
        self.new = ""
        self.is_complete = self.is_broken = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.is_broken

    def push(self, text: str) -> int:
        """How many characters belong to the object: all of them, unless it is over."""
        read: list[str] = []
        for character in text:
            if not (self.is_over or self._in_string) and self._cannot_be(character):
                self.is_broken = True
            if self.is_over:
                break
            read.append(self._read(character))
        self.new = "".join(read)
        return len(read)

    def _cannot_be(self, character: str) -> bool:
        """Whether a character outside of strings is none of JSON, such as that of a tag after an unfinished object."""
        return character in "<`" or (self._depth == 0 and character not in " \t\r\n{")

    def _read(self, character: str) -> str:
        """Read one more. Returns how valid JSON has it."""
        if self._in_string:
            was_escaped = self._is_escaped
            self._in_string = was_escaped or character != '"'
            self._is_escaped = character == "\\" and not was_escaped
            return character if character >= " " or was_escaped else f"\\u{ord(character):04x}"
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_complete = self._depth == 0
        return character


def decoded(text: str) -> Any:
    """The value of a JSON text, None if it is not valid."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def clean(text: str) -> str:
    """Halves of surrogate pairs, which JSON can escape, are no text that can be sent."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
