"""`[name(key="text", other=1), more()]`: Llama 3.2 and 4, ToolACE and others that write calls as Python does."""

from __future__ import annotations

import re
from collections.abc import Container

from kvllm.serving.tags import LONGEST_HEAD, first_tag
from kvllm.serving.tool_parsers.base import CallReader, TaggedParser
from kvllm.serving.tool_parsers.literals import PYTHON, LiteralReader

START, END = "<|python_start|>", "<|python_end|>"
NAME = r"\s*([A-Za-z_][\w.\-]*)"
CALL = re.compile(NAME + r"\((?=\s*(?:[A-Za-z_]\w*\s*=[^=]|\)\s*[,\]]))")
UNFINISHED = re.compile(r"\s*(?:[A-Za-z_][\w.\-]*(?:\(\s*(?:[A-Za-z_]\w*\s*=?|\)\s*)?)?)?")


class PythonicParser(TaggedParser):
    """A list counts as calls if its first item has keyword arguments or none, and is one of the request's tools."""

    tags = dropped = (START, END)
    closing = ("]",)
    next = ","

    def _reader(self, start: str) -> PythonicReader:
        return PythonicReader(self.functions)

    def _find(self, text: str) -> tuple[int, str | None]:
        place, tag = first_tag(text, (*self.dropped, "["))
        while tag == "[":
            head = text[place + 1 : place + LONGEST_HEAD]
            if (call := CALL.match(head)) is not None and _may_be(call[1], self.functions):
                return place, tag
            if place + 1 + len(head) == len(text) and UNFINISHED.fullmatch(head):
                return place, None
            skipped = place + 1
            place, tag = first_tag(text[skipped:], (*self.dropped, "["))
            place += skipped
        return place, tag


class PythonicReader(CallReader):
    """Reads one call. names: those that it may have, or none for any."""

    def __init__(self, names: Container[str]) -> None:
        super().__init__()
        self._names = names
        self._arguments = LiteralReader(PYTHON)

    def push(self, text: str) -> int:
        used = 0
        if self.name is None:
            head = CALL.match(text[:LONGEST_HEAD])
            if head is None or not _may_be(head[1], self._names):
                self.is_broken = UNFINISHED.fullmatch(text) is None or len(text) >= LONGEST_HEAD
                return 0
            self.name, used = head[1], head.end() - 1
        used += self._arguments.push(text[used:])
        self._new_arguments += self._arguments.take()
        self.is_complete, self.is_broken = self._arguments.is_complete, self._arguments.is_broken
        return used


def _may_be(name: str, names: Container[str]) -> bool:
    return not names or name in names
