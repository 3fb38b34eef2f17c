"""`[TOOL_CALLS]` and a list of objects, or `[TOOL_CALLS]name[ARGS]{...}`: Mistral's models, old and new."""

from __future__ import annotations

import re
from collections.abc import Callable

from kvllm.serving.tool_parsers.base import CallForm, CallReader, TaggedParser
from kvllm.serving.tool_parsers.json_calls import HeadedReader, ObjectReader

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


class ListedReader(CallReader):
    """Reads the first call after the tag, of either form."""

    def __init__(self) -> None:
        super().__init__()
        self._space = ""  # and the bracket of a list
        self._call: CallReader | None = None

    def push(self, text: str) -> int:
        used = 0
        while self._call is None and used < len(text):
            if text[used].isspace() or (text[used] == "[" and "[" not in self._space):
                self._space += text[used]
                used += 1
            else:
                is_object = "[" in self._space or text[used] == "{"
                self._call = ObjectReader() if is_object else HeadedReader(HEAD, (START,))
        self.raw = self._space
        if self._call is not None:
            used += self._call.push(text[used:])
            self._show(self._call)
        return used

    def finish(self) -> None:
        if self._call is not None:
            self._call.finish()
            self._show(self._call)

    def _show(self, call: CallReader) -> None:
        self.raw, self.name = self._space + call.raw, call.name
        self.is_complete, self.is_broken = call.is_complete, call.is_broken
        self._new_arguments += call.take_arguments()
