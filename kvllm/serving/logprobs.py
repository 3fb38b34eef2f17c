"""Log probabilities as OpenAI's two routes show them."""

from __future__ import annotations

import codecs
from typing import Any

from kvllm.outputs import Logprob
from kvllm.serving.protocol import CompletionLogprobs, GenerationFields, TokenLogprob, TopLogprob
from kvllm.serving.state import ServerState

Position = dict[int, Logprob] | None
"""The tokens that are reported at a position; None for the first one of a prompt, which nothing predicts."""


class TokenNames:
    """Texts of tokens, as a request, or else the server's operator, wants them: "token_id:7" for clients that count on
    different texts of different tokens."""

    def __init__(self, state: ServerState, request: GenerationFields) -> None:
        asked = request.return_tokens_as_token_ids
        self._as_ids = state.options.return_tokens_as_token_ids if asked is None else asked
        self._tokenizer = state.llm.tokenizer

    def __call__(self, token_id: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_name(token_id)

    def bytes(self, token_id: int) -> bytes:
        """What the token adds to a text. Without a tokenizer, the name has to do."""
        return self(token_id).encode() if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def text(self, token_ids: list[int]) -> str:
        """The text of a prompt that came as token ids."""
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids)


class LogprobLister:
    """The log probabilities of one completion, piece by piece, with the places of the tokens in its text.

    most: tokens at each position, besides the one that stands there.
    """

    def __init__(self, names: TokenNames, most: int) -> None:
        self._names = names
        self._most = most
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: list[int], positions: list[Position]) -> CompletionLogprobs:
        """The next tokens. A position may be None, and reports nothing then."""
        piece = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            own = None if position is None else position[token_id]
            piece.text_offset.append(self._offset)
            piece.tokens.append(self._names(token_id))
            piece.token_logprobs.append(None if own is None else _finite(own.logprob))
            piece.top_logprobs.append(None if position is None else self._top(token_id, position))
            self._offset += len(self._characters.decode(self._names.bytes(token_id)))
        return piece

    def _top(self, token_id: int, position: dict[int, Logprob]) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, logprob in most_likely(position, self._most, token_id):
            top.setdefault(self._names(other), _finite(logprob.logprob))
        return top


def chat_logprobs(
    names: TokenNames, token_ids: list[int], positions: list[dict[int, Logprob]], most: int
) -> list[TokenLogprob]:
    """Tokens of an answer, each with the `most` likely ones at its position."""
    tokens = []
    for token_id, position in zip(token_ids, positions, strict=True):
        top = [_shown(names, *pair) for pair in most_likely(position, most)]
        own = _shown(names, token_id, position[token_id])
        tokens.append(TokenLogprob(own.token, own.logprob, own.bytes, top))
    return tokens


def most_likely(position: dict[int, Logprob], most: int, also: int | None = None) -> list[tuple[int, Logprob]]:
    """The `most` likely tokens of a position (-1: all), and `also` if it is not among them."""
    most = len(position) if most == -1 else most
    ordered = sorted(position.items(), key=lambda pair: pair[1].rank or 0)
    return [pair for number, pair in enumerate(ordered) if number < most or pair[0] == also]


def prompt_logprobs(positions: list[Position]) -> list[dict[str, Any] | None]:
    """vLLM's field `prompt_logprobs`."""
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _finite(each.logprob), "rank": each.rank, "decoded_token": each.decoded_token}
            for token_id, each in position.items()
        }
        for position in positions
    ]


def _shown(names: TokenNames, token_id: int, logprob: Logprob) -> TopLogprob:
    return TopLogprob(names(token_id), _finite(logprob.logprob), list(names.bytes(token_id)))


def _finite(logprob: float) -> float:
    """JSON has no infinity: a forbidden token gets what vLLM gives it."""
    return max(logprob, -9999.0)
