"""What a tool parser is: it splits an answer into text and calls of tools, as the text arrives.

Most calls begin where a tag stands in the text, and are read by a reader of their own.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from kvllm.chat_messages import FunctionDefinition
from kvllm.serving.protocol import ChatFunctionCall, ChatToolCall
from kvllm.serving.tags import first_tag


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

    places: where in the text that was returned last its calls stand, for each how many characters are in front of it.
    tags: texts that the parser has to see, whether or not they are special tokens.
    form: how the model writes a call that a grammar forces; None: as `hermes` does.
    functions: those that may be called. Arguments that the model does not write as JSON take their types from them.
    """

    tags: ClassVar[tuple[str, ...]] = ()
    form: ClassVar[CallForm | None] = None

    def __init__(self, functions: Sequence[FunctionDefinition] = ()) -> None:
        self.functions = {function.name: function for function in functions}
        self.num_calls = 0
        self.places: list[int] = []
        self._held = ""
        self._texts: list[str] = []
        self._calls: list[ChatToolCall] = []
        self._places: list[int] = []

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
        self._give(ChatToolCall(index=self.num_calls, id=call_id, type="function", function=function))
        self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if not text:
            return
        if not self._calls:
            self._give(ChatToolCall(index=self.num_calls - 1, function=ChatFunctionCall()))
        self._calls[-1].function.arguments += text

    def _give(self, call: ChatToolCall) -> None:
        self._calls.append(call)
        self._places.append(sum(map(len, self._texts)))

    def _take(self) -> tuple[str, list[ChatToolCall]]:
        text, calls = "".join(self._texts), self._calls
        self.places, self._places = self._places, []
        self._texts, self._calls = [], []
        return text, calls


class CallReader(ABC):
    """Reads one call.

    raw: its text so far, which matters only while it has no name. name: once it is known that there is a call.
    is_complete, is_broken: where it has ended, or cannot go on. Which one depends on the text alone, not on its pieces.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.is_complete = self.is_broken = False
        self._new_arguments: str = ""

    @abstractmethod
    def push(self, text: str) -> int:
        """Read on. Returns how many characters were read. The others come again, with more text, unless it is over."""

    def take_arguments(self) -> str:
        """The arguments that are new, as JSON."""
        new, self._new_arguments = self._new_arguments, ""
        return new

    def finish(self) -> None:  # noqa: B027
        """The answer ends: a call that is known may still get its name and arguments."""


class State(Enum):
    """Where an answer is. AFTER: a call has ended, and its closing tags may follow."""

    TEXT = auto()
    CALL = auto()
    AFTER = auto()


class TaggedParser(ToolParser):
    """Subclasses say which tags there are, and how a call is read.

    starts: tags that a call begins with. closing: tags after a call that belong to it. next: a tag after a call that
    another one follows. dropped: tags in the text that say nothing.
    """

    starts: ClassVar[tuple[str, ...]] = ()
    closing: ClassVar[tuple[str, ...]] = ()
    next: ClassVar[str | None] = None
    dropped: ClassVar[tuple[str, ...]] = ()

    def __init__(self, functions: Sequence[FunctionDefinition] = ()) -> None:
        super().__init__(functions)
        self._state = State.TEXT
        self._call: CallReader = self._reader("")
        self._before = ""  # white space and the tag in front of the call, which are text if it is none
        self._is_named = False

    @abstractmethod
    def _reader(self, start: str) -> CallReader:
        """A reader of the call after a tag."""

    def _find(self, text: str) -> tuple[int, str | None]:
        """Where a call, or a tag that is dropped, may begin in the text, and its tag.

        The tag is None if all from there on has to wait for more.
        """
        return first_tag(text, self.starts + self.dropped)

    def _read(self, rest: str) -> str:
        if self._state is State.TEXT:
            return self._read_text(rest)
        return self._read_call(rest) if self._state is State.CALL else self._read_after(rest)

    def _end(self, held: str) -> None:
        if self._state is State.CALL:
            self._call.finish()
            self._give_call()
            if self._call.name is None:
                self._texts.append(self._before + self._call.raw + held)
        elif self._state is State.TEXT and not (self.num_calls and held.isspace()):
            self._texts.append(held)

    def _read_text(self, rest: str) -> str:
        place, tag = self._find(rest)
        text = rest[:place].rstrip()
        self._texts.append(text)
        if tag is None:
            self._held = rest[len(text) :]
            return ""
        after = rest[place + len(tag) :]
        if tag in self.dropped:
            return rest[len(text) : place] + after
        self._begin(rest[len(text) : place], tag)
        return after

    def _begin(self, space: str, tag: str) -> None:
        self._state, self._before, self._call, self._is_named = State.CALL, space + tag, self._reader(tag), False

    def _read_call(self, rest: str) -> str:
        call = self._call
        used = call.push(rest)
        self._give_call()
        if call.is_broken and call.name is None:
            self._state = State.TEXT
            self._texts.append(self._before + call.raw)
        elif call.is_complete or call.is_broken:
            self._state = State.AFTER
        else:
            self._held = rest[used:]
            return ""
        return rest[used:]

    def _give_call(self) -> None:
        """Give out what is known of the call: first its name, then its arguments."""
        if self._call.name is None:
            return
        if not self._is_named:
            self._begin_call(self._call.name)
            self._is_named = True
        self._add_arguments(self._call.take_arguments())

    def _read_after(self, rest: str) -> str:
        stripped = rest.lstrip()
        tags = self.closing if self.next is None else (*self.closing, self.next)
        for tag in tags:
            if stripped.startswith(tag):
                if tag == self.next:
                    self._begin(rest[: len(rest) - len(stripped)], tag)
                return stripped[len(tag) :]
        if any(tag.startswith(stripped) for tag in tags):
            self._held = rest
            return ""
        self._state = State.TEXT
        return rest
