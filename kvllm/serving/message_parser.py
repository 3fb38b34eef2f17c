"""The text of one choice as a message: thought, content and tool calls, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvllm.serving.harmony import HarmonyReasoningParser
from kvllm.serving.protocol import ChatToolCall
from kvllm.serving.reasoning import ReasoningParser
from kvllm.serving.tool_parsers import ToolParser

AnyReasoningParser = ReasoningParser | HarmonyReasoningParser


@dataclass(slots=True)
class MessagePart:
    """What is new of a message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ChatToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)

    def __add__(self, other: MessagePart) -> MessagePart:
        calls = self.tool_calls + other.tool_calls
        return MessagePart(self.reasoning + other.reasoning, self.content + other.content, calls)


class MessageParser:
    """Parses one choice.

    reasoning, tools: None where the text has no thought, or no calls.
    end_token_id: of the token that ends a thought, if it is one token.
    """

    def __init__(
        self, reasoning: AnyReasoningParser | None, tools: ToolParser | None, end_token_id: int | None = None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._end_token_id = end_token_id
        self.reasoning_tokens = 0
        """Tokens of the thought, its tags among them."""

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str, token_ids: list[int]) -> MessagePart:
        """What a piece of text adds. token_ids: those that made it."""
        if self._reasoning is None:
            return self._answer("", text)
        had_answer = self._reasoning.in_answer
        thought, answer = self._reasoning.push(text)
        if not had_answer:
            self._count(self._reasoning, token_ids)
        return self._answer(thought, answer)

    def finish(self) -> MessagePart:
        """What was held back until the end."""
        thought, answer = self._reasoning.finish() if self._reasoning else ("", "")
        part = self._answer(thought, answer)
        return part + MessagePart("", *self._tools.finish()) if self._tools else part

    def _count(self, reasoning: AnyReasoningParser, token_ids: list[int]) -> None:
        """Count the tokens up to the end of the thought. The last piece may have some of the answer, too."""
        if reasoning.in_answer and not reasoning.has_ended_thought:
            self.reasoning_tokens = 0  # there was none
        elif reasoning.in_answer and self._end_token_id in token_ids:
            self.reasoning_tokens += token_ids.index(self._end_token_id) + 1
        else:
            self.reasoning_tokens += len(token_ids)

    def _answer(self, thought: str, text: str) -> MessagePart:
        if self._tools is None:
            return MessagePart(thought, text)
        content, calls = self._tools.push(text)
        return MessagePart(thought, content, calls)
