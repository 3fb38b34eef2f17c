"""What a tool parser is: it splits an answer into text and calls of tools, as the text arrives."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvllm.chat_messages import FunctionDefinition
from kvllm.serving.protocol import ChatFunctionCall, ChatToolCall


@dataclass(frozen=True)
class CallForm:
    """How a forced call is written: the texts around its JSON.

    start, end: around each call; `{name}` in `start` stands for the function's name.
    key: of the arguments, in a JSON object that has the name, too; None: the JSON is that of the arguments alone.
    first, between, last: in front of the first call, between two, and after the last one.
    opening: what may stand in front of it all. one: whether an answer has one call only.
    """

    start: str = ""
    end: str = ""
    key: str | None = "arguments"
    first: str = ""
    between: str = ""
    last: str = ""
    opening: str = ""
    one: bool = False


class ToolParser(ABC):
    """Parses one answer. However its text is cut into pieces, the calls and the text are the same.

    A call's name comes first, as soon as it is certain that there is a call, and its arguments follow while they are
    written: what came so far is the beginning of a JSON object. A call that `max_tokens` cuts off ends where it is.
    What begins like a call and is none stays text, unless its name was given out already. White space in front of a
    call, and after the last one, is no text. No input raises an error.

    Subclasses implement `_read` and `_end`.

    tags: texts that the parser has to see, whether or not they are special tokens.
    form: how the model writes a call that a grammar forces; None: as `hermes` does.
    functions: those that may be called. Arguments that the model does not write as JSON take their types from them.
    """

    tags: ClassVar[tuple[str, ...]] = ()
    form: ClassVar[CallForm | None] = None

    def __init__(self, functions: Sequence[FunctionDefinition] = ()) -> None:
        self.functions = {function.name: function for function in functions}
        self.num_calls = 0
        self._held = ""
        self._texts: list[str] = []
        self._calls: list[ChatToolCall] = []

    def push(self, piece: str) -> tuple[str, list[ChatToolCall]]:
        """What is new of the text and of the calls."""
        rest, self._held = self._held + piece, ""
        while rest:
            rest = self._read(rest)
        return self._take()

    def finish(self) -> tuple[str, list[ChatToolCall]]:
        """What was held back until the end."""
        held, self._held = self._held, ""
        self._end(held)
        return self._take()

    @classmethod
    def forced_form(cls, token_id_of: Callable[[str], int | None]) -> CallForm | None:
        """The form for a tokenizer. token_id_of: the id of a token that stands for a text on its own, or None."""
        return cls.form

    @abstractmethod
    def _read(self, rest: str) -> str:
        """Read the beginning of `rest`. Returns what is left; sets `_held` to what has to wait, and returns ""."""

    @abstractmethod
    def _end(self, held: str) -> None:
        """The answer ends, with `held` not read."""

    def _begin_call(self, name: str) -> None:
        call_id, function = f"call_{uuid.uuid4().hex[:24]}", ChatFunctionCall(name=name)
        self._calls.append(ChatToolCall(index=self.num_calls, id=call_id, type="function", function=function))
        self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if not text:
            return
        if not self._calls:
            self._calls.append(ChatToolCall(index=self.num_calls - 1, function=ChatFunctionCall()))
        self._calls[-1].function.arguments += text

    def _take(self) -> tuple[str, list[ChatToolCall]]:
        text, calls = "".join(self._texts), self._calls
        self._texts, self._calls = [], []
        return text, calls
