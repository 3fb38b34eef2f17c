"""Calls of tools as a message has them, whole or piece by piece."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class ChatFunctionCall(Struct, kw_only=True):
    """A function's name, and its arguments as JSON text; or what is new of these."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ChatToolCall(Struct, kw_only=True):
    """A call, or what is new of one. index: its number among the message's calls, in a stream."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: ChatFunctionCall
