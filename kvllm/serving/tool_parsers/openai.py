"""Harmony, the form of gpt-oss: a message to `functions.name` is a call."""

from __future__ import annotations

from collections.abc import Sequence

from kvllm.chat_messages import FunctionDefinition
from kvllm.serving.harmony import CHANNEL, CONSTRAIN, MESSAGE, START, TAGS, HarmonyReader, Piece
from kvllm.serving.tool_parsers.base import CallForm, ToolParser


class OpenAIParser(ToolParser):
    """The text is that of messages to the user, in any channel but `analysis`: `openai_gptoss` reads the thoughts."""

    tags = TAGS
    form = CallForm(
        start=f"{CHANNEL}commentary to=functions.{{name}} {CONSTRAIN}json{MESSAGE}",
        key=None,
        opening=f"{START}assistant",
        one=True,
    )

    def __init__(self, functions: Sequence[FunctionDefinition] = ()) -> None:
        super().__init__(functions)
        self._reader = HarmonyReader()

    def _read(self, rest: str) -> str:
        for piece in self._reader.push(rest):
            self._take_piece(piece)
        return ""

    def _end(self, held: str) -> None:
        for piece in self._reader.finish():
            self._take_piece(piece)

    def _take_piece(self, piece: Piece) -> None:
        if piece.function and piece.raw.endswith(MESSAGE) and not piece.body:
            self._begin_call(piece.function)
        elif piece.function:
            self._add_arguments(piece.body)
        elif not piece.is_thought:
            self._texts.append(piece.body)
