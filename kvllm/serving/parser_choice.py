"""`auto` for the parsers of calls and thoughts: which ones the chat template speaks of."""

from __future__ import annotations

import logging
from dataclasses import replace

from kvllm.engine_args import EngineArgs
from kvllm.errors import ConfigError, RequestError
from kvllm.serving.state import ServerOptions
from kvllm.tokenizer import find_tokenizer

logger = logging.getLogger(__name__)
AUTO = "auto"
Markers = tuple[tuple[tuple[str, ...], str | None], ...]

# Texts of which a template has all, and the parser. The first that fits counts: the tags of a form may be part of
# another's template.
TOOL_MARKERS: Markers = (
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|channel|>", "functions."), "openai"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), None),  # GLM's form, which no parser reads
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": ', "tool_call"), "llama3_json"),
    (("<|python_start|>",), "pythonic"),
    (("func_name1(params_name1=params_value1",), "pythonic"),
)
THOUGHT_MARKERS: Markers = (
    (("<|channel|>", "analysis"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("<think>",), "qwen3"),
    (("</think>",), "deepseek_r1"),
    (("Here is my thought process:",), "granite"),
)


def with_parsers(options: ServerOptions, args: EngineArgs) -> ServerOptions:
    """The options with the parsers that `auto` stands for. Raises ConfigError.

    Without a `tool_call_parser`, `enable_auto_tool_choice` stands for `auto`.
    """
    tools, thoughts = options.tool_call_parser, options.reasoning_parser
    if tools is None and options.enable_auto_tool_choice:
        tools = AUTO
    if AUTO not in (tools, thoughts):
        return options
    template = options.chat_template or _own_template(args)
    if tools == AUTO:
        tools = chosen_parser("--tool-call-parser", template, TOOL_MARKERS)
    if thoughts == AUTO:
        thoughts = chosen_parser("--reasoning-parser", template, THOUGHT_MARKERS)
    return replace(options, tool_call_parser=tools, reasoning_parser=thoughts)


def chosen_parser(flag: str, template: str | None, markers: Markers) -> str:
    """The parser that fits a chat template. Raises ConfigError."""
    texts, name = next((each for each in markers if template and all(text in template for text in each[0])), ((), None))
    if name is not None:
        logger.info("%s %s: the chat template has %s", flag, name, " and ".join(texts))
        return name
    names = ", ".join(dict.fromkeys(name for _, name in markers if name is not None))
    what = "has the tags of none of them" if template else "is missing"
    raise ConfigError(f"{flag} auto cannot choose: the chat template {what}: name one of {names}, or leave it out")


def _own_template(args: EngineArgs) -> str | None:
    tokenizer = find_tokenizer(args.tokenizer_files)
    try:
        return tokenizer.chat_template(None, [{}]) if tokenizer else None
    except RequestError:  # it has none
        return None
