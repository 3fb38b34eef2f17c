"""`call:name{key:value}` between tags, with a tag around each text: FunctionGemma and Gemma 4."""

from __future__ import annotations

import re
from typing import ClassVar

from kvllm.serving.tool_parsers.base import TaggedParser
from kvllm.serving.tool_parsers.json_calls import HeadedReader
from kvllm.serving.tool_parsers.literals import Dialect, LiteralReader

HEAD = re.compile(r"\s*(?:call)?:\s*([^\s{}]+)\s*")
"""Gemma 4 leaves out the word now and then."""
WORD = re.compile(r"[^,:{}\[\]<]+")


class FunctionGemmaParser(TaggedParser):
    """`<start_function_call>call:name{key:<escape>text<escape>}<end_function_call>`."""

    quote: ClassVar[str] = "<escape>"
    tags = ("<start_function_call>", "<end_function_call>", quote)
    starts = tags[:1]
    closing = tags[1:2]

    def _reader(self, start: str) -> HeadedReader:
        return GemmaReader(self.quote, self.starts + self.closing)


class Gemma4Parser(FunctionGemmaParser):
    """`<|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>`."""

    quote = '<|"|>'
    tags = ("<|tool_call>", "<tool_call|>", quote)
    starts = tags[:1]
    closing = tags[1:2]


class GemmaReader(HeadedReader):
    """quote: the tag around texts. stops: the tags around calls."""

    def __init__(self, quote: str, stops: tuple[str, ...]) -> None:
        super().__init__(HEAD, stops)
        self._literal = LiteralReader(Dialect((quote,), False, WORD))

    def _read_arguments(self, text: str) -> int:
        used = self._literal.push(text)
        self._new_arguments += self._literal.take()
        self.is_complete, self.is_broken = self._literal.is_complete, self._literal.is_broken
        return used
