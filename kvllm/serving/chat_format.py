"""The form of a chat's answer: whether it may have a thought, calls of tools, and a rule to obey."""

from __future__ import annotations

from typing import Any

from kvllm.chat_messages import text_of
from kvllm.serving.constraint import behind_thought, constraint
from kvllm.serving.harmony import HarmonyReasoningParser
from kvllm.serving.message_parser import AnyReasoningParser, MessageParser, MessagePart
from kvllm.serving.protocol import ChatCompletionRequest
from kvllm.serving.reasoning import HARMONY, ReasoningParser, ThoughtTags, is_thought_open, thought_tags
from kvllm.serving.state import ServerState
from kvllm.serving.tool_choice import ToolChoice
from kvllm.serving.tool_parsers import ToolParser
from kvllm.serving.tool_parsers.openai import OpenAIParser


class ChatFormat:
    """What one request says about it.

    prompt: as the chat template has rendered it. tags: those of a thought, if the model has thoughts.
    """

    def __init__(self, state: ServerState, body: ChatCompletionRequest, tools: ToolChoice, prompt: str) -> None:
        name = state.options.reasoning_parser
        self.tags = None if name is None else thought_tags(name)
        self._tools = tools
        self._shows_thought = body.include_reasoning is not False
        self._tokenizer = state.tokenizer
        continued = continued_text(body)
        self._is_open = self.tags is not None and is_thought_open(prompt, self.tags, continued)
        self._rule = constraint(body, state.tokenizer, tools)
        if self._rule is not None and self.tags is not None:
            self._rule = behind_thought(self._rule, self.tags, prompt, continued)

    def parser(self) -> MessageParser:
        """A parser for one choice."""
        if self.tags is None:
            return MessageParser(None, self._tool_parser())
        end = self._tokenizer.added_token_ids.get(self.tags.end)
        return MessageParser(self._reasoning_parser(self.tags), self._tool_parser(), end)

    def sampling(self) -> dict[str, Any]:
        """Options of the engine."""
        options: dict[str, Any] = {"structured_outputs": self._rule}
        tags = self._tools.parser.tags if self._tools.may_call else ()
        tags += (self.tags.start, self.tags.end, *self.tags.others) if self.tags else ()
        if any(self._tokenizer.added_token_ids.get(tag) in self._tokenizer.special_token_ids for tag in tags):
            options["skip_special_tokens"] = False  # the parsers would not see them
        return options

    def shown(self, part: MessagePart) -> MessagePart:
        """The part as the client wants it."""
        if not self._shows_thought:
            part.reasoning = ""
        if not self._tools.several:
            part.tool_calls = [call for call in part.tool_calls if call.index == 0]
        return part

    def _tool_parser(self) -> ToolParser | None:
        return self._tools.parser(self._tools.functions) if self._tools.may_call else None

    def _reasoning_parser(self, tags: ThoughtTags) -> AnyReasoningParser:
        if tags is HARMONY:
            return HarmonyReasoningParser(self._is_open, self._tools.may_call and self._tools.parser is OpenAIParser)
        return ReasoningParser(tags, self._is_open)


def continued_text(body: ChatCompletionRequest) -> str:
    """The text of the message that is continued, if one is."""
    return text_of(body.messages[-1].get("content")) if body.continue_final_message else ""
