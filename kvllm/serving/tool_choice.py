"""The tools of a request: which of them the model may or must call, and the grammar of an answer that has to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvllm.chat_messages import FunctionDefinition, functions_of
from kvllm.serving.errors import bad_request
from kvllm.serving.limits import MAX_TOOLS, check_count
from kvllm.serving.protocol import ChatCompletionRequest
from kvllm.serving.state import ServerOptions
from kvllm.serving.tools import END, START
from kvllm.structured.grammar import literal


@dataclass(frozen=True)
class ToolChoice:
    """What the model does with tools.

    may_call: whether calls are looked for. must_call: the functions of which one has to be called.
    several: whether more than one call may come.
    """

    may_call: bool = False
    must_call: tuple[FunctionDefinition, ...] = ()
    several: bool = True


def tool_choice(body: ChatCompletionRequest, options: ServerOptions) -> ToolChoice:
    """Raises ApiError for a choice that cannot be obeyed, and RequestError for malformed tools."""
    tools, choice = body.tools or [], body.tool_choice
    check_count("tools", len(tools), MAX_TOOLS)
    functions = tuple(functions_of(tools))
    if not functions:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return ToolChoice()
    several = body.parallel_tool_calls is not False
    if choice == "none":
        return ToolChoice()
    if choice in (None, "auto"):
        if not options.enable_auto_tool_choice:
            flags = "--enable-auto-tool-choice and --tool-call-parser to be set"
            raise bad_request(f'"auto" tool choice requires {flags}', "tool_choice")
        return ToolChoice(may_call=True, several=several)
    if choice == "required":
        return ToolChoice(may_call=True, must_call=functions, several=several)
    if isinstance(choice, str):
        raise bad_request(f"tool_choice={choice!r} is not allowed: none, auto, required or a function", "tool_choice")
    named = tuple(function for function in functions if function.name == choice.function.name)
    if not named:
        raise bad_request(f"tool_choice names {choice.function.name!r}, which is none of the tools", "tool_choice")
    return ToolChoice(may_call=True, must_call=named[:1], several=False)


def calls_grammar(choice: ToolChoice, token_id_of: Callable[[str], int | None]) -> str:
    """The Lark grammar of calls as `HermesParser` reads them.

    token_id_of: the id of a token that stands for a tag on its own, or None.
    """
    start, end = literal(START, token_id_of), literal(END, token_id_of)
    names = " | ".join(f"tool_{index}" for index in range(len(choice.must_call)))
    more = " (BREAK call)*" if choice.several else ""
    lines = [f"start: call{more}", "BREAK: /\\n/", f"call: {start} BREAK ({names}) BREAK {end}"]
    lines += [f"tool_{i}: %json {json.dumps(_call_schema(each))}" for i, each in enumerate(choice.must_call)]
    return "\n".join(lines)


def _call_schema(function: FunctionDefinition) -> dict[str, Any]:
    parameters = function.parameters or {"type": "object"}
    # References of the function's schema start at its own root.
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": " ?"},
        **definitions,
    }
