"""The grammar of an answer that has to call tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvllm.serving.tools import END, START
from kvllm.structured.grammar import literal


def calls_grammar(tools: list[dict[str, Any]], token_id_of: Callable[[str], int | None], *, several: bool) -> str:
    """The Lark grammar of calls as `HermesParser` reads them.

    tools: those that may be called, each `{"name": ..., "parameters": JSON schema}`.
    token_id_of: the id of a token that stands for a tag on its own, or None.
    several: whether more than one call may come.
    """
    start, end = literal(START, token_id_of), literal(END, token_id_of)
    names = " | ".join(f"tool_{index}" for index in range(len(tools)))
    more = " (BREAK call)*" if several else ""
    lines = [f"start: call{more}", "BREAK: /\\n/", f"call: {start} BREAK ({names}) BREAK {end}"]
    lines += [f"tool_{index}: %json {json.dumps(_call_schema(tool))}" for index, tool in enumerate(tools)]
    return "\n".join(lines)


def _call_schema(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = tool.get("parameters") or {"type": "object"}
    # References of the tool's schema start at its own root.
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": tool["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": " ?"},
        **definitions,
    }
