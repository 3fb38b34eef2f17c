"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3 and many others."""

from __future__ import annotations

from kvllm.serving.tool_parsers.base import CallForm, TaggedParser
from kvllm.serving.tool_parsers.json_calls import ObjectReader

START, END = "<tool_call>", "</tool_call>"


class HermesParser(TaggedParser):
    """`parameters` may stand for `arguments`, and the arguments may be JSON in a string."""

    tags = (START, END)
    starts = (START,)
    closing = (END,)
    form = CallForm(start=f"{START}\n", end=f"\n{END}", between="\n")

    def _reader(self, start: str) -> ObjectReader:
        return ObjectReader()
