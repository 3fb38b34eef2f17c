"""The forms of DeepSeek: the name after a tag, and JSON arguments, which V3 and R1 put into a fence."""

from __future__ import annotations

import re

from kvllm.serving.tool_parsers.base import CallForm, TaggedParser
from kvllm.serving.tool_parsers.json_calls import HeadedReader

FIRST, LAST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
START, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


class DeepSeekV31Parser(TaggedParser):
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`."""

    tags = (FIRST, START, SEP, END, LAST)
    starts = (START,)
    closing = (END, LAST)
    dropped = (FIRST, LAST)
    form = CallForm(f"{START}{{name}}{SEP}", END, None, FIRST, "", LAST)
    head = re.compile(rf"\s*([^\s<>]+)\s*{SEP}\s*")

    def _reader(self, start: str) -> HeadedReader:
        return HeadedReader(self.head, (FIRST, START, END, LAST))


class DeepSeekV3Parser(DeepSeekV31Parser):
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a line break, and the arguments in a fence of json."""

    closing = (FENCE, END, LAST)
    form = CallForm(f"{START}function{SEP}{{name}}\n{FENCE}json\n", f"\n{FENCE}{END}", None, FIRST, "\n", LAST)
    head = re.compile(rf"\s*function\s*{SEP}\s*([^\s<>]+)\s*(?:{FENCE}(?:json)?\s*)?")
