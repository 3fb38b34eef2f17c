"""`[TOOL_CALLS]` and a list of objects, or `[TOOL_CALLS]name[ARGS]{...}`: Mistral's models, old and new."""

from __future__ import annotations

import re
from collections.abc import Callable

from kvllm.serving.tool_parsers.base import CallForm
from kvllm.serving.tool_parsers.json_calls import HeadedReader, ObjectReader
from kvllm.serving.tool_parsers.tagged import CallReader, TaggedParser

START, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
HEAD = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")


class MistralParser(TaggedParser):
    """Reads both forms, the new one with or without `[CALL_ID]` and `[ARGS]`."""

    tags = (START, CALL_ID, ARGS)
    starts = (START,)
    closing = ("]",)
    next = ","
    form = CallForm(first=f"{START} [", between=", ", last="]")

    @classmethod
    def forced_form(cls, token_id_of: Callable[[str], int | None]) -> CallForm | None:
        """The new form if the tokenizer has its tag."""
        return cls.form if token_id_of(ARGS) is None else CallForm(start=f"{START}{{name}}{ARGS}", key=None)

    def _reader(self, start: str) -> CallReader:
        return ListedReader() if start == START else ObjectReader()


class ListedReader:
    """Reads the first call after the tag, of either form."""

    def __init__(self) -> None:
        self._space = ""  # and the bracket of a list
        self._call: CallReader | None = None

    @property
    def raw(self) -> str:
        return self._space + (self._call.raw if self._call else "")

    @property
    def name(self) -> str | None:
        return self._call.name if self._call else None

    @property
    def is_complete(self) -> bool:
        return self._call is not None and self._call.is_complete

    @property
    def is_broken(self) -> bool:
        return self._call is not None and self._call.is_broken

    def push(self, text: str) -> int:
        used = 0
        while self._call is None and used < len(text):
            if text[used].isspace() or (text[used] == "[" and "[" not in self._space):
                self._space += text[used]
                used += 1
            else:
                is_object = "[" in self._space or text[used] == "{"
                self._call = ObjectReader() if is_object else HeadedReader(HEAD, (START,))
        return used + (self._call.push(text[used:]) if self._call else 0)

    def take_arguments(self) -> str:
        return self._call.take_arguments() if self._call else ""

    def finish(self) -> None:
        if self._call:
            self._call.finish()
