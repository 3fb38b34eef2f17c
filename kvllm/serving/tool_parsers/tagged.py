"""Calls that begin where a tag stands in the text, each read by a reader of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from typing import ClassVar, Protocol

from kvllm.chat_messages import FunctionDefinition
from kvllm.serving.tags import first_tag
from kvllm.serving.tool_parsers.base import ToolParser


class CallReader(Protocol):
    """Reads one call.

    raw: its text so far, which matters only while it has no name. name: once it is known that there is a call.
    is_complete, is_broken: where it has ended, or cannot go on. Which one depends on the text alone, not on its pieces.
    """

    @property
    def raw(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def is_broken(self) -> bool: ...

    def push(self, text: str) -> int:
        """Read on. Returns how many characters were read. The others come again, with more text, unless it is over."""
        ...

    def take_arguments(self) -> str:
        """The arguments that are new, as JSON."""
        ...

    def finish(self) -> None:
        """The answer ends: a call that is known may still get its name and arguments."""
        ...


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
        behind = rest[place + len(tag) :]
        if tag in self.dropped:
            return rest[len(text) : place] + behind
        self._begin(rest[len(text) : place], tag)
        return behind

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
