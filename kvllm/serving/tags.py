"""Tags in text that arrives in pieces."""

from __future__ import annotations

LONGEST_HEAD = 1000
"""Most characters in front of a call's arguments that are held back to find its name."""


def unfinished_tag(text: str, tag: str) -> int:
    """The length of the longest end of `text` that is a beginning of `tag`, but not all of it."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


def first_tag(text: str, tags: tuple[str, ...]) -> tuple[int, str | None]:
    """Where the first of several tags stands in a text, and which one it is.

    Without one: the length of the text that is no beginning of a tag, and None.
    """
    found = [(place, tag) for tag in tags if (place := text.find(tag)) >= 0]
    if found:
        return min(found, key=lambda each: (each[0], -len(each[1])))
    return len(text) - max((unfinished_tag(text, tag) for tag in tags), default=0), None
