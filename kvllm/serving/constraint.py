"""The rule that a request's text has to obey: from `structured_outputs`, `response_format` or a choice of tools."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from kvllm.errors import ConfigError
from kvllm.serving.errors import bad_request
from kvllm.serving.protocol import ChatCompletionRequest, CompletionRequest, ResponseFormat
from kvllm.serving.reasoning import ThoughtTags, is_thought_open, is_thought_over
from kvllm.serving.tool_choice import ToolChoice, calls_grammar
from kvllm.structured.json_schema import with_options
from kvllm.structured_outputs import StructuredOutputsParams
from kvllm.tokenizer import Tokenizer


def constraint(
    body: CompletionRequest | ChatCompletionRequest, tokenizer: Tokenizer | None = None, tools: ToolChoice | None = None
) -> StructuredOutputsParams | None:
    """The rule of a request, or None. Raises ApiError and ConfigError.

    tokenizer, tools: of a chat. Where it must call one, there is no text that a response_format could hold for.
    """
    found = {
        "structured_outputs": _structured_outputs(body.structured_outputs),
        "response_format": _of_format(body.response_format),
    }
    if tools is not None and tools.must_call:
        assert tokenizer is not None  # else there is no chat
        found["response_format"] = None
        found["tool_choice"] = StructuredOutputsParams(grammar=calls_grammar(tools, tokenizer.added_token_ids.get))
    given = [name for name, rule in found.items() if rule is not None]
    if len(given) > 1:
        raise bad_request(f"{' and '.join(given)} exclude each other: give one", given[0])
    return found[given[0]] if given else None


def behind_thought(
    rule: StructuredOutputsParams, tags: ThoughtTags, prompt: str, continued: str, must_call: bool
) -> StructuredOutputsParams:
    """The rule for the answer alone, wherever the prompt leaves room for a thought in front of it. Forced calls have
    their own openings."""
    if rule.free_end is not None or is_thought_over(prompt, tags):
        return rule
    if tags.openings and not must_call:
        rule = structs.replace(rule, free_openings=list(tags.openings))
    if is_thought_open(prompt, tags, continued):
        return structs.replace(rule, free_end=tags.end)
    return structs.replace(rule, free_end=tags.end, free_start=tags.start)


def _structured_outputs(fields: dict[str, Any] | None) -> StructuredOutputsParams | None:
    if not fields:
        return None
    try:
        return StructuredOutputsParams(**{name: value for name, value in fields.items() if value is not None})
    except ConfigError as error:
        raise bad_request(f"structured_outputs: {error}", "structured_outputs") from None


def _of_format(wanted: ResponseFormat | None) -> StructuredOutputsParams | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if wanted.type != "json_schema":
        allowed = "text, json_object or json_schema"
        raise bad_request(f"response_format.type={wanted.type!r} is not allowed: {allowed}", "response_format")
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise bad_request("response_format needs json_schema: {name, schema}", "response_format")
    return StructuredOutputsParams(json=with_options(wanted.json_schema.schema, wanted.json_schema.strict))
