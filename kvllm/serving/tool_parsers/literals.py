"""Arguments in literals of Python, or of Gemma's form, to JSON as they arrive."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from enum import Enum, auto

from kvllm.serving.tags import unfinished_tag

WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
CLOSING = {"{": "}", "[": "]", "(": ")"}
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.?)", re.DOTALL)
UNFINISHED_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{0,2})\Z")
ESCAPED = dict(zip("ntrbfav\\'\"", "\n\t\r\b\f\a\v\\'\"", strict=True))
NUMBER = re.compile(r"[+-]?(?:0[xX][\da-fA-F]+|(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)")
PREFIX = re.compile(r"[rRbBuUfF]{1,2}(?=['\"])")


@dataclass(frozen=True)
class Dialect:
    """How literals are written.

    quotes: texts around strings, those first that begin with others. escapes: whether a backslash escapes in them.
    word: a number, a name or a keyword.
    """

    quotes: tuple[str, ...]
    escapes: bool
    word: re.Pattern[str]


PYTHON = Dialect(("'''", '"""', "'", '"'), True, re.compile(r"[\w.+\-]+"))


class Expects(Enum):
    """What comes next."""

    KEY = auto()
    VALUE = auto()
    SEPARATOR = auto()  # of a key and its value
    COMMA = auto()


@dataclass
class Level:
    """A bracket that is open. closing: what closes it. is_empty: nothing came in it yet."""

    is_object: bool
    closing: str
    is_empty: bool = field(default=True)


class LiteralReader:
    """Reads one object: `{...}`, or the arguments of a call in Python, `(a=1, b="c")`.

    is_complete, is_broken: whether it has ended, or cannot go on.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.is_complete = self.is_broken = False
        self._dialect = dialect
        self._levels: list[Level] = []
        self._expects = Expects.VALUE
        self._quote = ""
        self._is_raw = False  # the string, in which a backslash stands for itself
        self._json: list[str] = []

    def push(self, text: str) -> int:
        """Read on. Returns how many characters were read: the others come again with more, unless it is over."""
        place = 0
        while place < len(text) and not (self.is_complete or self.is_broken):
            used = self._read_string(text[place:]) if self._quote else self._read(text[place:])
            place += used
            if used == 0:
                break
        return place

    def take(self) -> str:
        """The JSON that is new."""
        new = "".join(self._json)
        self._json.clear()
        return new

    def _read(self, text: str) -> int:
        """Read what is not in a string. Returns how many characters, 0 if more is needed, or if it is broken."""
        if text[0].isspace():
            return len(text) - len(text.lstrip())
        if self._dialect.escapes and (prefix := PREFIX.match(text)):
            self._is_raw = "r" in prefix[0].lower()
            return prefix.end()
        for quote in self._dialect.quotes:
            if text.startswith(quote):
                return self._open_string(quote)
            if quote.startswith(text):
                return 0
        if text[0] in "{[(":
            return self._open(text[0])
        if text[0] in "}])":
            return self._close(text[0])
        if text[0] in ",:=":
            return self._separate(text[0])
        word = self._dialect.word.match(text)
        if word is None:
            return self._break()
        return 0 if word.end() == len(text) else self._write_word(word[0])

    def _break(self) -> int:
        self.is_broken = True
        return 0

    def _open(self, bracket: str) -> int:
        if self._expects is not Expects.VALUE:
            return self._break()
        is_object = bracket == "{" or not self._levels
        self._begin_item()
        self._json.append("{" if is_object else "[")
        self._levels.append(Level(is_object, CLOSING[bracket]))
        self._expects = Expects.KEY if is_object else Expects.VALUE
        return 1

    def _close(self, bracket: str) -> int:
        may_end = self._expects in (Expects.KEY, Expects.COMMA) or (self._levels and not self._levels[-1].is_object)
        if not self._levels or self._levels[-1].closing != bracket or not may_end:
            return self._break()
        self._json.append("}" if self._levels.pop().is_object else "]")
        self._expects = Expects.COMMA
        self.is_complete = not self._levels
        return 1

    def _separate(self, sign: str) -> int:
        if sign == "," and self._expects is Expects.COMMA:
            self._expects = Expects.KEY if self._levels[-1].is_object else Expects.VALUE
        elif sign != "," and self._expects is Expects.SEPARATOR:
            self._json.append(": ")
            self._expects = Expects.VALUE
        else:
            return self._break()
        return 1

    def _begin_item(self) -> None:
        """A comma comes in front of a further item: one at the end, which Python allows, is not written."""
        if not self._levels or (self._levels[-1].is_object and self._expects is Expects.VALUE):
            return
        if not self._levels[-1].is_empty:
            self._json.append(", ")
        self._levels[-1].is_empty = False

    def _open_string(self, quote: str) -> int:
        if not self._levels or self._expects not in (Expects.KEY, Expects.VALUE):
            return self._break()
        self._begin_item()
        self._json.append('"')
        self._quote = quote
        return len(quote)

    def _read_string(self, text: str) -> int:
        end = self._find_quote(text)
        inside = text if end < 0 else text[:end]
        if end < 0:
            inside = inside[: len(inside) - unfinished_tag(inside, self._quote)]
            inside = self._without_unfinished_escape(inside)
        self._json.append(self._escaped(inside))
        if end < 0:
            return len(inside)
        self._json.append('"')
        used, self._quote, self._is_raw = end + len(self._quote), "", False
        self._step()
        return used

    def _find_quote(self, text: str) -> int:
        if not self._dialect.escapes:
            return text.find(self._quote)
        found = re.match(rf"(?:[^\\]|\\.)*?{self._quote}", text, re.DOTALL)
        return found.end() - len(self._quote) if found else -1

    def _without_unfinished_escape(self, text: str) -> str:
        last = max((escape.start() for escape in ESCAPE.finditer(text)), default=len(text))
        is_unfinished = self._dialect.escapes and UNFINISHED_ESCAPE.match(text, last) is not None
        return text[:last] if is_unfinished else text

    def _escaped(self, text: str) -> str:
        if self._is_raw or not self._dialect.escapes:
            return _json_text(text)
        parts, end = [], 0
        for escape in ESCAPE.finditer(text):
            parts += [_json_text(text[end : escape.start()]), _json_text(_unescaped(escape[0]))]
            end = escape.end()
        return "".join([*parts, _json_text(text[end:])])

    def _write_word(self, word: str) -> int:
        if not self._levels or self._expects not in (Expects.KEY, Expects.VALUE):
            return self._break()
        self._begin_item()
        text = word.strip()
        self._json.append(json.dumps(text) if self._expects is Expects.KEY else _word_json(text))
        self._step()
        return len(word)

    def _step(self) -> None:
        """A key or a value is over."""
        self._expects = Expects.SEPARATOR if self._expects is Expects.KEY else Expects.COMMA


def _word_json(word: str) -> str:
    if word in WORDS:
        return WORDS[word]
    if NUMBER.fullmatch(word):
        try:
            return json.dumps(ast.literal_eval(word), allow_nan=False)
        except (ValueError, SyntaxError):
            pass
    return json.dumps(word, ensure_ascii=False)


def _unescaped(escape: str) -> str:
    """The character of an escape in a string of Python."""
    if escape == "\\\n":
        return ""
    if escape[1] == "U" and len(escape) == 10 and int(escape[2:], 16) > 0x10FFFF:
        return escape
    if len(escape) > 2 and escape[1] in "xuU":
        return chr(int(escape[2:], 16))
    if escape[1] in "01234567":
        return chr(int(escape[1:], 8))
    return ESCAPED.get(escape[1], escape)


def _json_text(text: str) -> str:
    """Text in a JSON string. Halves of surrogate pairs stay escaped: they cannot be sent otherwise."""
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", written)
