"""Text of a conversation stays text: no message begins a turn by spelling the token that begins one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from typing import Any

from kvllm.tokenizer import Tokenizer

MARK = "\ufdd0"
"""A code point that Unicode keeps free for programs. It stands inside of what is not to become a token."""


class TextMarker:
    """Marks the spellings of tokens in the texts of messages, before a chat template joins them with its own.

    tokens: those that a message may not write.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        spellings = {token for token in tokens if len(token) > 1 and not token.isspace()}
        self._pattern = re.compile(_any_of(sorted(spellings))) if spellings else None
        self._beginnings = {token[:end] for token in spellings for end in range(1, len(token))}
        self._longest = max(map(len, spellings), default=0)

    def mark(self, value: Any) -> Any:
        """The value, with a mark after the first character of each spelling in its texts and keys, and after the
        beginning of one at the end of a text: templates join parts."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list | tuple) else value

    def _mark_text(self, text: str) -> str:
        if self._pattern is None:
            return text
        found = 1
        while found:  # a mark in a long spelling leaves a shorter one inside of it
            text, found = self._pattern.subn(lambda match: match[0][0] + MARK + match[0][1:], text)
        ends = range(1, min(self._longest, len(text) + 1))
        return text + MARK if any(text[-length:] in self._beginnings for length in ends) else text


@lru_cache(maxsize=16)
def text_marker(tokenizer: Tokenizer, template: str = "") -> TextMarker:
    """Marks special tokens, and the added ones that a template writes itself: some checkpoints declare the tokens of
    turns as ordinary ones."""
    added = tokenizer.added_token_ids.items()
    return TextMarker(text for text, i in added if i in tokenizer.special_token_ids or text in template)


def mark_messages(tokenizer: Tokenizer, messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Messages for `Tokenizer.apply_chat_template`, whose text `encode_marked` encodes.

    In those of the assistant, tags that are no special tokens stay: templates look for thoughts there.
    """
    own, others = text_marker(tokenizer), text_marker(tokenizer, template)
    return [(own if message["role"] == "assistant" else others).mark(message) for message in messages]


def unmark(text: str) -> str:
    """The text without marks."""
    return text.replace(MARK, "")


def encode_marked(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text, where no marked spelling becomes its token: it is encoded like any other text.

    Raises RequestError, as `Tokenizer.encode` does.
    """
    if MARK not in text:
        return tokenizer.encode(text, add_special_tokens)
    pieces = tokenizer.encode_spans(text, add_special_tokens)
    if pieces is not None and not any(MARK in text[begin:end] and end - begin > 1 for _, begin, end in pieces):
        return [token_id for token_id, begin, end in pieces if text[begin:end] != MARK]
    first, *rest = text.split(MARK)  # marks have become a part of other tokens
    token_ids = tokenizer.encode(first, add_special_tokens)
    for piece in rest:
        token_ids += tokenizer.encode(piece, add_special_tokens=False)
    return token_ids


def _any_of(words: list[str]) -> str:
    """A pattern of the longest of sorted words, without a look at each: checkpoints have thousands of tokens."""
    branches = []
    for first, group in groupby((word for word in words if word), key=lambda word: word[0]):
        branches.append(re.escape(first) + _any_of([word[1:] for word in group]))
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{joined})?" if "" in words else joined
