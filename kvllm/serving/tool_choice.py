"""The tools of a request: which of them the model may or must call, and the grammar of an answer that has to."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from msgspec import structs

from kvllm.chat_messages import FunctionDefinition, functions_of
from kvllm.errors import RequestError
from kvllm.serving.errors import bad_request, check_count
from kvllm.serving.protocol import AllowedTools, ChatCompletionRequest, NamedToolChoice
from kvllm.serving.state import ServerOptions
from kvllm.serving.tool_parsers import HermesParser, ToolParser, tool_parser
from kvllm.structured.grammar import literal
from kvllm.structured.json_schema import with_options
from kvllm.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)
Check = Callable[[StructuredOutputsParams], Awaitable[None]]
"""Raises RequestError for a rule that cannot be obeyed."""
MAX_TOOLS = 128
MAX_SECONDS = 5.0
"""Time to look for the tools whose schemas cannot be compiled. One that explodes takes a second or two."""
TokenIdOf = Callable[[str], int | None]
"""The id of a token that stands for a tag on its own, or None."""


@dataclass(frozen=True)
class ToolChoice:
    """What the model does with tools.

    may_call: whether calls are looked for. must_call: the functions of which one has to be called.
    named: whether the request names that function. several: whether more than one call may come. functions: all of the
        request.
    parser: reads the calls. A call that a grammar forces has the form of `hermes` where the model's own is not JSON.
    """

    may_call: bool = False
    must_call: tuple[FunctionDefinition, ...] = ()
    named: bool = False
    several: bool = True
    functions: tuple[FunctionDefinition, ...] = ()
    parser: type[ToolParser] = HermesParser


def tool_choice(body: ChatCompletionRequest, options: ServerOptions) -> ToolChoice:
    """Leaves the tools of the request that it allows.

    Raises ApiError for a choice that cannot be obeyed, and RequestError for malformed tools.
    """
    check_count("tools", len(body.tools or ()), MAX_TOOLS)
    functions, choice = tuple(functions_of(body.tools or ())), body.tool_choice
    if isinstance(choice, NamedToolChoice) and choice.type == "allowed_tools":
        functions, choice = _allowed(body, functions, choice.allowed_tools)
    if not functions:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return ToolChoice()
    several = body.parallel_tool_calls is not False
    if choice == "none":
        return ToolChoice()
    if choice in (None, "auto"):
        if not options.enable_auto_tool_choice:
            flags = "--enable-auto-tool-choice to be set"
            raise bad_request(f'"auto" tool choice requires {flags}', "tool_choice")
        return ToolChoice(may_call=True, several=several, functions=functions, parser=_parser(options))
    forced = _parser(options) if _parser(options).form else HermesParser
    if choice == "required":
        return ToolChoice(True, functions, named=False, several=several, functions=functions, parser=forced)
    if isinstance(choice, str):
        raise bad_request(f"tool_choice={choice!r} is not allowed: none, auto, required or a function", "tool_choice")
    if choice.type != "function":
        problem = "function and allowed_tools are"
        raise bad_request(f"tool_choice of type {choice.type[:100]!r} is not supported: {problem}", "tool_choice")
    named = tuple(function for function in functions if function.name == choice.name)
    if not named:
        raise bad_request(f"tool_choice names {choice.name!r}, which is none of the tools", "tool_choice")
    return ToolChoice(True, named[:1], named=True, several=False, functions=functions, parser=forced)


def check_allowed(mode: str | None, allowed: set[str], known: set[str]) -> None:
    """Raises ApiError for a choice among tools that cannot be obeyed."""
    if mode not in ("auto", "required"):
        raise bad_request(f"tool_choice.mode={mode!r:.100} is not allowed: auto or required", "tool_choice")
    if unknown := allowed - known:
        raise bad_request(f"tool_choice allows {min(unknown)[:100]!r}, which is none of the tools", "tool_choice")
    if not allowed and mode == "required":
        raise bad_request("tool_choice requires one of no tools: name those that are allowed", "tool_choice")


def _allowed(
    body: ChatCompletionRequest, functions: tuple[FunctionDefinition, ...], choice: AllowedTools | None
) -> tuple[tuple[FunctionDefinition, ...], str]:
    """The functions that a request allows, and its mode. The request loses the other tools: no template shows them."""
    if choice is None:
        raise bad_request("tool_choice of type 'allowed_tools' needs allowed_tools: {mode, tools}", "tool_choice")
    allowed = {each.name for each in choice.tools}
    check_allowed(choice.mode, allowed, {function.name for function in functions})
    kept = [index for index, function in enumerate(functions) if function.name in allowed]
    body.tools = [(body.tools or [])[index] for index in kept]
    return tuple(functions[index] for index in kept), choice.mode


def _parser(options: ServerOptions) -> type[ToolParser]:
    return HermesParser if options.tool_call_parser is None else tool_parser(options.tool_call_parser)


def calls_grammar(choice: ToolChoice, token_id_of: TokenIdOf) -> str:
    """The Lark grammar of calls in the form that the choice's parser reads.

    The schema of a tool's arguments is a grammar of its own: its references start at its own root.
    """
    form = choice.parser.forced_form(token_id_of)
    assert form is not None  # else the parser is that of hermes

    def text(literal_text: str) -> str:
        return literal(literal_text, token_id_of) + " " if literal_text else ""

    opening = f"({text(form.opening)})? " if form.opening else ""
    more = f" ({text(form.between)}call)*" if choice.several and not form.one else ""
    calls = " | ".join(f"call_{index}" for index in range(len(choice.must_call)))
    lines = [f"start: {opening}{text(form.first)}call{more} {text(form.last)}", f"call: {calls}", "CLOSE: / ?}/"]
    for i, function in enumerate(choice.must_call):
        start = text(form.start.replace("{name}", function.name))
        lines.append(f"call_{i}: {start}tool_{i} {text(form.end)}")
        if form.key is None:
            lines.append(f"tool_{i}: arguments_{i}")
        else:
            head = ("{", '"name"', ":", _text(function.name), ",", _text(form.key), ":")
            lines.append(f"HEAD_{i}: {' '.join(f'{_text(token)} / ?/' for token in head)}")
            lines.append(f"tool_{i}: HEAD_{i} arguments_{i} CLOSE")
        lines.append(f"arguments_{i}: %json {json.dumps(_schema(function))}")
    return "\n".join(lines)


async def with_usable_schemas(choice: ToolChoice, check: Check, token_id_of: TokenIdOf) -> ToolChoice:
    """The choice, where tools whose schemas cannot be compiled take any object.

    Raises ApiError if such a tool is strict or named by the request, or if finding out takes too long.
    """
    if not choice.must_call:
        return choice
    try:
        await check(StructuredOutputsParams(grammar=calls_grammar(choice, token_id_of)))
    except RequestError:
        end = time.monotonic() + MAX_SECONDS
        return replace(choice, must_call=tuple([await _usable(each, choice, check, end) for each in choice.must_call]))
    return choice


async def _usable(function: FunctionDefinition, choice: ToolChoice, check: Check, end: float) -> FunctionDefinition:
    try:
        await check(StructuredOutputsParams(json=_schema(function)))
        return function
    except RequestError as error:
        if function.strict or choice.named or time.monotonic() > end:
            raise bad_request(f"the parameters of the tool {function.name[:100]!r}: {error}", "tools") from None
        _log_any_object(function.name, str(error))
    return structs.replace(function, parameters=None)


@lru_cache(1000)
def _log_any_object(name: str, error: str) -> None:
    """Once for each."""
    logger.warning("the tool %s takes any object as its arguments: %s", ascii(name)[:100], ascii(error)[:500])


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    schema = {"type": "object", **(function.parameters or {})}
    return with_options(schema, function.strict, whitespace_pattern=" ?")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
