"""Tags in text that arrives in pieces."""

from __future__ import annotations


def unfinished_tag(text: str, tag: str) -> int:
    """The length of the longest end of `text` that is a beginning of `tag`, but not all of it."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
