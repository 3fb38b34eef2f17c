"""Conversations and tools as clients have them, and the prompts that chat templates make of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from kvllm.content_format import ContentFormat, content_format
from kvllm.control_tokens import mark_messages, text_marker
from kvllm.errors import RequestError
from kvllm.tokenizer import Tokenizer, check_messages

RESERVED = ("messages", "conversation", "tokenize", "return_dict", "return_tensors")
"""Names that `chat_template_kwargs` may not have: they would change more than what the template sees."""
NULL_CONTENT = re.compile(r"\bcontent\b['\"]?\]? is none")
"""In templates that ask for it: transformers leaves fields that are null out."""
T = TypeVar("T", bound=Struct)


class ContentPart(Struct, kw_only=True):
    """A part of a message: text alone is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, kw_only=True):
    """arguments: JSON as text, as OpenAI has it, or an object. What is neither is what a model may have written."""

    name: str
    arguments: Any = None


class ToolCall(Struct, kw_only=True):
    """A call of a tool that the assistant has made before."""

    function: FunctionCall
    id: str | None = None
    type: str | None = "function"


class ChatMessage(Struct, kw_only=True):
    """A message of a conversation. The template sees further fields as they are."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(Struct, kw_only=True):
    """A function that the model may call. parameters: the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    """A tool that the model may call: a function. The template sees further fields as they are."""

    function: FunctionDefinition
    type: str = "function"


class Conversation(Struct):
    """Checks messages. Its errors name their place."""

    messages: list[ChatMessage]


class Tools(Struct):
    """Checks tools. Its errors name their place."""

    tools: list[Tool]


def render_chat(
    tokenizer: Tokenizer, messages: Any, tools: Sequence[Mapping[str, Any]] | None, options: Mapping[str, Any]
) -> str:
    """The prompt's text for a conversation, for `encode_marked`: it has marks where a message spells a control token.

    Args:
        messages: a list of messages in OpenAI's form, see `ChatMessage`. What `template_messages` does not speak of
            reaches the template as it is: no key is lost, and their order stays. They are not changed.
        tools: in OpenAI's form, see `Tool`. They reach the template as they are.
        options: of `Tokenizer.apply_chat_template`: `chat_template`, `add_generation_prompt`, and what the template
            reads.

    Raises:
        RequestError: there is no template, it cannot render these messages, or the options have a name of `RESERVED`.
            `param` says where a fault is.
    """
    if reserved := [name for name in RESERVED if name in options]:
        raise RequestError(f"chat_template_kwargs may not have {reserved[0]!r}", param="chat_template_kwargs")
    if tools:
        functions_of(tools)
        options = {**options, "tools": list(tools)}
    template = tokenizer.chat_template(options.get("chat_template"), options.get("tools"))
    conversation = mark_messages(tokenizer, template_messages(messages, content_format(template)), template)
    foreign = {name: options[name] for name in ("tools", "documents") if options.get(name)}
    options = {**options, **text_marker(tokenizer, template).mark(foreign)}
    functions = [call["function"] for message in conversation for call in message.get("tool_calls", ())]
    text = _render_calls(tokenizer, conversation, functions, options)
    if NULL_CONTENT.search(template) and any(function["name"] not in text for function in functions):
        raise RequestError(
            "the chat template writes tool calls only where the content is null, which it is never told, as the first "
            "one of DeepSeek-R1 does: use a newer template of this model (--chat-template)"
        )
    return text


def _render_calls(
    tokenizer: Tokenizer, conversation: list[dict[str, Any]], functions: list[dict[str, Any]], options: dict[str, Any]
) -> str:
    """The text of a conversation. Where a template fails at the arguments of calls, it is given others: objects alone,
    for one that goes through their names, which what a model wrote may not have; and text, which DeepSeek's join."""
    try:
        return tokenizer.apply_chat_template(conversation, **options)
    except RequestError:
        objects = [each["arguments"] if isinstance(each["arguments"], dict) else {} for each in functions]
        texts = [json.dumps(each, ensure_ascii=False) for each in objects]
        for forms in (objects, texts) if functions else ():
            for function, arguments in zip(functions, forms, strict=True):
                function["arguments"] = arguments
            with suppress(RequestError):
                return tokenizer.apply_chat_template(conversation, **options)
        raise


def template_messages(messages: Any, form: ContentFormat) -> list[dict[str, Any]]:
    """Messages as a template reads them.

    A field that is null is left out, and so is an empty list of calls. A content has a form that the template reads,
    its texts joined by line breaks if that is text; without one, it is empty. The role `developer` becomes `system`. A
    thought stands under both its names. The arguments of calls are objects, not JSON text; what is no JSON of an object
    stays as it is.

    Raises:
        RequestError: a message has no role, fields of wrong types, or parts that are not text.
    """
    check_messages(messages)
    _check({"messages": messages}, Conversation)
    return [_template_message(index, message, form) for index, message in enumerate(messages)]


def functions_of(tools: Sequence[Mapping[str, Any]]) -> list[FunctionDefinition]:
    """The functions that tools are. Raises RequestError."""
    found = _check({"tools": tools}, Tools).tools
    for tool in found:
        if tool.type != "function":
            problem = f'a tool of type {tool.type[:100]!r} is not supported: "function" is'
            raise RequestError(problem, param="tools")
    return [tool.function for tool in found]


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """A tool in OpenAI's form. The order of its keys is that of transformers' `get_json_schema`, which models know."""
    fields = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": _without_nulls(fields)}


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    """The text of a message's content."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part.get(part["type"]) or "" for part in content)


def _check(fields: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        place = str(error).rpartition("`$.")[2].rstrip("`")  # of "Expected `str`, got `int` - at `$.tools[0].type`"
        raise RequestError(str(error), param=place) from None


def _template_message(index: int, message: dict[str, Any], form: ContentFormat) -> dict[str, Any]:
    found = _without_nulls(message)
    if message["role"] == "tool":  # templates that read parts elsewhere print a result as it is
        form = ContentFormat()
    found["content"] = _content(index, message.get("content"), form)
    if message["role"] == "developer":  # OpenAI's newer name, which most templates do not know and would leave out
        found["role"] = "system"
    thought = found.get("reasoning_content", found.get("reasoning"))
    if thought is not None:  # templates read either name
        found["reasoning"] = found["reasoning_content"] = thought
    calls = found.pop("tool_calls", None)
    if calls:
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Clients send null for what is absent; a template may ask whether it is there."""
    return {name: value for name, value in fields.items() if value is not None}


def _content(index: int, content: str | list[dict[str, Any]] | None, form: ContentFormat) -> str | list[dict[str, Any]]:
    if isinstance(content, list | tuple):
        parts = [_text_part(index, part) for part in content]
        return parts if form.parts else text_of(parts)
    if form.text:
        return content or ""
    return [] if content is None else [{"type": "text", "text": content}]


def _text_part(index: int, part: dict[str, Any]) -> dict[str, Any]:
    """A part as templates know it."""
    kind = part["type"]
    if kind not in ("text", "refusal"):
        problem = f"messages[{index}] has a part of type {kind[:100]!r}: only text parts are understood"
        raise RequestError(problem, param=f"messages[{index}].content")
    if part.get(kind) is None:
        problem = f"messages[{index}] has a part of type {kind!r} without {kind!r}"
        raise RequestError(problem, param=f"messages[{index}].content")
    return part if kind == "text" else {"type": "text", "text": part["refusal"]}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**_without_nulls(call), "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Any:
    """The arguments of a call as templates expect them: an object, not its JSON text."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(given)
        json.dumps(found, ensure_ascii=False).encode()  # fails at half a character, which only an escape can write
    except (ValueError, RecursionError):
        return given
    return {} if found is None else found if isinstance(found, dict) else given
