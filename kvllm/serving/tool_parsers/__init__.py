"""Tool parsers, by the names that vLLM has for them."""

from __future__ import annotations

from kvllm.errors import ConfigError
from kvllm.serving.tool_parsers.base import CallForm, ToolParser
from kvllm.serving.tool_parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from kvllm.serving.tool_parsers.gemma import FunctionGemmaParser, Gemma4Parser
from kvllm.serving.tool_parsers.hermes import HermesParser
from kvllm.serving.tool_parsers.llama3_json import Llama3JsonParser
from kvllm.serving.tool_parsers.mistral import MistralParser
from kvllm.serving.tool_parsers.openai import OpenAIParser
from kvllm.serving.tool_parsers.pythonic import PythonicParser
from kvllm.serving.tool_parsers.qwen3_coder import Qwen3CoderParser

__all__ = ["TOOL_PARSERS", "CallForm", "HermesParser", "ToolParser", "tool_parser"]

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "functiongemma": FunctionGemmaParser,
    "gemma4": Gemma4Parser,
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "llama4_pythonic": PythonicParser,
    "mistral": MistralParser,
    "openai": OpenAIParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
}


def tool_parser(name: str) -> type[ToolParser]:
    """The parser of a `--tool-call-parser`. Raises ConfigError."""
    if name not in TOOL_PARSERS:
        raise ConfigError(f"tool_call_parser={name!r} is not known: choose auto or one of {', '.join(TOOL_PARSERS)}")
    return TOOL_PARSERS[name]
