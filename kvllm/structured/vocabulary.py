"""A checkpoint's vocabulary, as llguidance needs it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from kvllm.errors import RequestError
from kvllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Decoders whose tokens' bytes llguidance finds out from the tokenizer's file.
KNOWN_DECODERS = ("ByteLevel", "ByteFallback")


class Vocabulary(Struct, frozen=True):
    """The bytes of every token.

    tokenizer_json: the tokenizer's file, if its decoder is a usual one; else `tokens` has the bytes of each token.
    added_tokens: ids of the tokens that were added to the vocabulary as a whole, by their text.
    eos_token_ids: tokens that end a text. size: of the model's logits.
    """

    tokenizer_json: str | None
    tokens: list[bytes]
    added_tokens: dict[str, int]
    special_token_ids: list[int]
    eos_token_ids: list[int]
    size: int

    def build(self) -> LLTokenizer:
        """llguidance's tree of all tokens: about a second for 150,000 of them."""
        from llguidance import LLTokenizer

        size = max(self.size, len(self.tokens))
        if self.tokenizer_json is not None:
            return LLTokenizer(self.tokenizer_json, n_vocab=self.size, eos_token=self.eos_token_ids)
        # A slice is a set of tokens whose masks are shared between grammars: few tokens gain nothing by it.
        return LLTokenizer(_wrapped(self), n_vocab=size, eos_token=self.eos_token_ids, slices=[])


def read_vocabulary(tokenizer: Tokenizer, model_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """The vocabulary of a tokenizer, for a model with logits for `model_size` tokens.

    Raises RequestError if nothing can be constrained with it.
    """
    if not eos_token_ids:
        raise RequestError("structured_outputs needs a token that ends a text, and the checkpoint names none")
    backend = getattr(tokenizer.hf, "backend_tokenizer", None)
    if backend is None:
        raise RequestError("structured_outputs needs a tokenizer.json, and the checkpoint has none")
    file, text, tokens = json.loads(backend.to_str()), None, []
    size = max(model_size, len(tokenizer.hf))
    if any(f'"{name}"' in json.dumps(file["decoder"]) for name in KNOWN_DECODERS):
        text = _without_limits(file, tokenizer)
    else:
        tokens = [tokenizer.decode_token(token_id).encode() for token_id in range(size)]
    return Vocabulary(
        text, tokens, tokenizer.added_token_ids, sorted(tokenizer.special_token_ids), list(eos_token_ids), size
    )


def _without_limits(file: dict[str, Any], tokenizer: Tokenizer) -> str:
    """The tokenizer's file, with the tokens that are special by their names elsewhere: in a rule they are no text."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    missing = tokenizer.special_token_ids.difference(tokenizer.added_token_ids.values())
    named = [
        {"id": i, "content": tokenizer.hf.convert_ids_to_tokens(i), **flags, "special": True} for i in sorted(missing)
    ]
    added = sorted([*file["added_tokens"], *named], key=lambda token: token["id"])
    return json.dumps({**file, "added_tokens": added, "truncation": None, "padding": None})


def _wrapped(vocabulary: Vocabulary) -> Any:
    from llguidance import TokenizerWrapper

    special = set(vocabulary.special_token_ids)

    class Tokens:
        eos_token_id = vocabulary.eos_token_ids[0]
        bos_token_id = None
        tokens = vocabulary.tokens
        special_token_ids = vocabulary.special_token_ids

        def __call__(self, text: bytes) -> list[int]:
            return _longest_first(ids, text)

    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if token_id not in special and token}
    return TokenizerWrapper(Tokens())


def _longest_first(ids: dict[bytes, int], text: bytes) -> list[int]:
    """Token ids of a text that a grammar leaves no choice about, up to the first byte without a token."""
    token_ids: list[int] = []
    longest = max(map(len, ids))
    while text:
        ends = (end for end in range(min(longest, len(text)), 0, -1) if text[:end] in ids)
        end = next(ends, None)
        if end is None:
            break
        token_ids.append(ids[text[:end]])
        text = text[end:]
    return token_ids
