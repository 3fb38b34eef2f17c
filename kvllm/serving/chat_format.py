"""The form of a chat's answer: its thought, text and calls of tools, piece by piece, and the rule that it obeys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvllm.chat_messages import text_of
from kvllm.serving.constraint import behind_thought, constraint
from kvllm.serving.harmony import HarmonyReasoningParser
from kvllm.serving.protocol import ChatCompletionRequest, ChatToolCall
from kvllm.serving.reasoning import HARMONY, ReasoningParser, is_thought_open, thought_tags
from kvllm.serving.state import ServerState
from kvllm.serving.tool_choice import ToolChoice
from kvllm.serving.tool_parsers import ToolParser
from kvllm.serving.tool_parsers.openai import OpenAIParser

AnyReasoningParser = ReasoningParser | HarmonyReasoningParser


@dataclass(slots=True)
class MessagePart:
    """What is new of a message. places: for each call, how many characters of the content are in front of it."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ChatToolCall] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)

    def __add__(self, other: MessagePart) -> MessagePart:
        calls = self.tool_calls + other.tool_calls
        places = self.places + [len(self.content) + place for place in other.places]
        return MessagePart(self.reasoning + other.reasoning, self.content + other.content, calls, places)


class MessageParser:
    """Parses one choice.

    reasoning, tools: None where the text has no thought, or no calls.
    end_token_id: of the token that ends a thought, if it is one token.
    """

    def __init__(
        self, reasoning: AnyReasoningParser | None, tools: ToolParser | None, end_token_id: int | None
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
        return part + MessagePart("", *self._tools.finish(), self._tools.places) if self._tools else part

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
        return MessagePart(thought, content, calls, self._tools.places)


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
            self._rule = behind_thought(self._rule, self.tags, prompt, continued, bool(tools.must_call))

    def parser(self) -> MessageParser:
        """A parser for one choice."""
        tools, tags = self._tools, self.tags
        calls = tools.parser(tools.functions) if tools.may_call else None
        if tags is None:
            return MessageParser(None, calls, None)
        if tags is HARMONY:
            thought = HarmonyReasoningParser(self._is_open, tools.may_call and tools.parser is OpenAIParser)
        else:
            thought = ReasoningParser(tags, self._is_open)
        return MessageParser(thought, calls, self._tokenizer.added_token_ids.get(tags.end))

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
            first = sum(call.index == 0 for call in part.tool_calls)  # they are in order
            part.tool_calls, part.places = part.tool_calls[:first], part.places[:first]
        return part


def continued_text(body: ChatCompletionRequest) -> str:
    """The text of the message that is continued, if one is."""
    return text_of(body.messages[-1].get("content")) if body.continue_final_message else ""
