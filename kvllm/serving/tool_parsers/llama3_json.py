"""`{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>` in front: Llama 3.1 and later."""

from __future__ import annotations

import re

from kvllm.serving.tags import LONGEST_HEAD, first_tag
from kvllm.serving.tool_parsers.base import CallForm, TaggedParser
from kvllm.serving.tool_parsers.json_calls import ObjectReader

TAG = "<|python_tag|>"
KEYS = ("name", "type", "parameters", "arguments")
FIRST_KEY = re.compile(r'\{\s*(?:"([^"]*)("?))?')


class Llama3JsonParser(TaggedParser):
    """Several calls have `;` between them. An object without the tag is a call only if it names a tool of the
    request."""

    tags = starts = (TAG,)
    next = ";"
    form = CallForm(key="parameters", between="; ")

    def _reader(self, start: str) -> ObjectReader:
        return ObjectReader(None if start == TAG or not self.functions else self.functions)

    def _find(self, text: str) -> tuple[int, str | None]:
        place, tag = first_tag(text, (TAG, "{"))
        while tag == "{":
            key = FIRST_KEY.match(text[place : place + LONGEST_HEAD])
            assert key is not None  # it matches every brace
            at_end = place + key.end() == len(text)
            if key[2] and key[1] in KEYS:
                return place, ""
            if at_end and (key[1] is None or (any(each.startswith(key[1]) for each in KEYS) and not key[2])):
                return place, None
            skipped = place + 1
            place, tag = first_tag(text[skipped:], (TAG, "{"))
            place += skipped
        return place, tag
