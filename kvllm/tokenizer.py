"""Text to tokens and back: the checkpoint's tokenizer, text that grows token by token, and stop strings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvllm.errors import CheckpointError, RequestError
from kvllm.files.checkpoint import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
# Tokens that begin so have a leading space: SentencePiece's mark, and the byte of a space.
SENTENCEPIECE_SPACES = ("\u2581", "<0x20>")
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
# A character has at most 4 bytes. More tokens than this without a complete one at their end are a run of invalid bytes.
MAX_PENDING = 16
# Tokens of a prompt's end that are looked at: some characters of up to 4 bytes, each byte possibly a token of its own.
PROMPT_CONTEXT = 12


def load_tokenizer(path: str | Path) -> Tokenizer:
    """As `tokenizer_of`, of the local checkpoint with this path."""
    return tokenizer_of(open_checkpoint(path))


def find_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The same, but None if the checkpoint has no vocabulary: prompts can still be token ids."""
    return tokenizer_of(checkpoint) if checkpoint.has_tokenizer() else None


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """Load the tokenizer of a checkpoint. Nothing is downloaded, and no code from the checkpoint is run.

    Raises:
        CheckpointError: the checkpoint or the tokenizer's files are missing or cannot be read.
    """
    try:
        hf = checkpoint.read_tokenizer()
        return Tokenizer(hf, checkpoint.eos_tokens(hf))
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a broken tokenizer.json
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the tokenizer in {checkpoint.path} cannot be loaded: {what}") from error


class Tokenizer:
    """A transformers tokenizer (`hf`), with errors that name what is wrong with a request.

    added_token_ids: of the tokens that were added to the vocabulary as a whole, such as "</think>", by their text.
    special_token_ids: of those that are no part of text. eos_token_ids: of those that end a text.
    """

    def __init__(self, hf: PreTrainedTokenizerBase, eos_tokens: Iterable[str] = ()) -> None:
        """`eos_tokens` are more of them than `hf` knows."""
        self.hf = hf
        self.added_token_ids = {token.content: i for i, token in hf.added_tokens_decoder.items()}
        self._token_bytes: dict[int, bytes] = {}
        self._backend = getattr(hf, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = False  # so that a chat template can write them
        special = {i for i, token in hf.added_tokens_decoder.items() if token.special}
        self.special_token_ids = frozenset(special.union(self._known(hf.all_special_tokens)))
        named = [] if hf.eos_token is None else [str(hf.eos_token)]
        self.eos_token_ids = tuple(dict.fromkeys(self._known([*named, *eos_tokens])))
        # Log probabilities of the whole vocabulary name each of its tokens at every position.
        self.decode_token = cache(self._decode_token)

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids of a prompt. Text made by `apply_chat_template` has its special tokens already.

        most: so many tokens, special ones among them; the last ones of a longer text are left out.

        Raises:
            RequestError: not a string, not encodable as UTF-8, or with characters that the vocabulary lacks.
        """
        _check_text(text)
        try:
            if self._backend is not None:
                if most is None:
                    return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
                encoded = self._backend.encode(text, add_special_tokens=False)
                special = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
                encoded.truncate(max(0, most - special))
                return self._backend.post_process(encoded, None, add_special_tokens).ids
            cut = {} if most is None else {"truncation": True, "max_length": most}
            return self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False, **cut)
        except Exception as error:  # tokenizers raises bare Exception for a character without a token
            raise _cannot_encode(error) from None

    def encode_spans(self, text: str, add_special_tokens: bool) -> list[tuple[int, int, int]] | None:
        """Token ids of a prompt, each with the beginning and end of its characters; None if that is not known.

        Raises RequestError, as `encode` does.
        """
        _check_text(text)
        if self._backend is None:
            return None
        try:
            encoded = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:
            raise _cannot_encode(error) from None
        return [(token_id, *span) for token_id, span in zip(encoded.ids, encoded.offsets, strict=True)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of tokens, as the model wrote it. Ids outside of the vocabulary have no text."""
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if token_id not in self.special_token_ids]
        if self._backend is not None:  # a fifth of the time: it shows when 64 streams get a token at each step
            return self._backend.decode(list(token_ids), skip_special_tokens=False)
        # Cleaning up would change text that was given out already: it joins "word" and " ." once the dot arrives.
        return self.hf.decode(  # type: ignore[return-value]  # a list only for batches
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _decode_token(self, token_id: int) -> str:
        """Text of one token as it stands after others: a Llama-style decoder drops the space that a text begins with.

        Parts of a character are U+FFFD. Ids outside of the vocabulary have no text.
        """
        text = self.decode([token_id])
        if not str(self.hf.convert_ids_to_tokens(token_id)).startswith(SENTENCEPIECE_SPACES):
            return text
        return self.decode([token_id, token_id])[len(text) :]

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text in UTF-8: a token that is a part of a character has some of its bytes."""
        found = self._token_bytes.get(token_id)
        if found is None:
            text = self.decode_token(token_id)
            found = text.encode()
            if REPLACEMENT in text:
                found = _bytes_of_token(str(self.hf.convert_ids_to_tokens(token_id))) or found
            self._token_bytes[token_id] = found
        return found

    def token_name(self, token_id: int) -> str:
        r"""Text of one token, or `bytes:\xe4\xb8` for one that is a part of a character, as OpenAI writes it."""
        own = self.token_bytes(token_id)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def chat_template(self, chosen: str | None = None, tools: list[Any] | None = None) -> str:
        """The text of the chat template for these tools.

        chosen: another one than the checkpoint's own, as text, or the name of one out of several that it has.

        Raises:
            RequestError: there is no template, or `chosen` is no text.
        """
        if chosen is not None and not isinstance(chosen, str):
            raise RequestError(f"chat_template={chosen!r} is not allowed: give the text of a Jinja template")
        if self.hf.chat_template is None and chosen is None:
            raise RequestError("the checkpoint has no chat template: pass chat_template, or prompt with plain text")
        try:
            return self.hf.get_chat_template(chosen, tools)
        except ValueError as error:  # of several, none is the default
            raise RequestError(f"the checkpoint has no chat template by default: {error}") from None

    def token_id(self, name: str) -> int | None:
        """Of a token as the vocabulary writes it; None if it has none."""
        return next(self._known([name]), None)

    def _known(self, names: Iterable[str]) -> Iterator[int]:
        """Ids of the tokens that the vocabulary has: transformers gives that of an unknown token for the others."""
        for name in names:
            token_id = self.hf.convert_tokens_to_ids(name)
            if token_id is not None and self.hf.convert_ids_to_tokens(token_id) == name:
                yield token_id  # type: ignore[misc]  # a list only for lists

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt's text for a conversation. Encode it with `add_special_tokens=False`.

        messages: dicts with "role" and what the template reads, as a rule "content".
        kwargs: for the template (such as `enable_thinking`) or for transformers (`chat_template`, `tools`).

        Raises:
            RequestError: there is no template, or the messages do not fit it.
        """
        kwargs["chat_template"] = self.chat_template(kwargs.get("chat_template"), kwargs.get("tools"))
        check_messages(messages)
        try:
            return self.hf.apply_chat_template(  # type: ignore[return-value]  # tokens only with tokenize=True
                messages, add_generation_prompt=add_generation_prompt, tokenize=False, **kwargs
            )
        except Exception as error:  # the template is a program: it may fail in any way on messages it does not expect
            raise RequestError(
                f"the chat template cannot render these messages: {type(error).__name__}: {error}"
            ) from error


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise RequestError(f"a prompt must be a string or a list of token ids, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not valid Unicode: {error}") from None


def _cannot_encode(error: Exception) -> RequestError:
    return RequestError(f"the checkpoint's tokenizer cannot encode the prompt: {error}")


def _bytes_of_token(name: str) -> bytes | None:
    """The bytes that a vocabulary writes as `<0xE4>`, or in the alphabet of byte-level tokenizers."""
    if found := BYTE_TOKEN.fullmatch(name):
        return bytes([int(found[1], 16)])
    alphabet = _byte_alphabet()
    return bytes(alphabet[character] for character in name) if alphabet.keys() >= set(name) else None


@cache
def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def check_messages(messages: Any) -> None:
    """Raises RequestError for what is not a list of dicts that have a role."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(f"messages must be a list of at least one message, not {messages!r:.200}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            problem = f'messages[{index}] must be a dict with a "role" and a "content", not {message!r:.200}'
            raise RequestError(problem, param=f"messages[{index}]")


class IncrementalDecoder:
    """Text of a growing list of tokens, at a cost per token that does not grow with the list.

    The pieces add up to what the tokens add to the text of the prompt: `tokenizer.decode` of the prompt and the tokens
    begins with the prompt's text, and the pieces are the rest. No piece ends inside a character. (One exception: a
    byte-fallback decoder rejects a whole run of bytes for an invalid one at its end. Text given out before it stays.)
    New tokens are decoded after those of the piece before, and the first ones after the end of the prompt: decoders
    of the Llama 2 kind drop the leading space of a text, and only of a text.

    Args:
        skip_special_tokens: leave special tokens out of the text, those of the prompt too.
        prompt_token_ids: the tokens before these. If the prompt ends inside a character that the first tokens complete,
            the character belongs to the pieces.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        with_text = (token_id for token_id in reversed(prompt_token_ids) if token_id not in self._skipped)
        prompt_end = list(islice(with_text, PROMPT_CONTEXT))[::-1]
        self._context, self._pending = _split_characters(tokenizer, prompt_end)
        self._context_length = len(tokenizer.decode(self._context)) if self._context else 0
        # The end of a prompt that stops inside a character. Empty once any text was given out.
        self._broken_end = tokenizer.decode(self._context + self._pending) if self._pending else ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; what may still change is kept for later."""
        self._pending += [token_id for token_id in token_ids if token_id not in self._skipped]
        text = self._tokenizer.decode(self._context + self._pending)
        if not text.endswith(REPLACEMENT):
            return self._release(len(self._pending), text)
        if len(self._pending) > MAX_PENDING:
            return self._release_invalid(text)
        return ""

    def finish(self) -> str:
        """The rest of the text: an incomplete character becomes U+FFFD."""
        return self._release(len(self._pending), self._tokenizer.decode(self._context + self._pending))

    def _release(self, count: int, text: str) -> str:
        """Give out the first `count` pending tokens; `text` is the context's and theirs."""
        released, self._pending = self._pending[:count], self._pending[count:]
        if self._broken_end and text.startswith(self._broken_end):  # nothing has completed the prompt's last character
            self._context_length = len(self._broken_end)
        self._broken_end = ""
        piece = text[self._context_length :]
        if piece:
            self._context, self._context_length = released, len(self._tokenizer.decode(released))
        elif len(self._context) < MAX_PENDING:
            # Without text, yet a decoder may look at them: a lone leading space makes the next one stay.
            self._context += released
        return piece

    def _release_invalid(self, text: str) -> str:
        """Give out all but the last few tokens, cut between two characters: a cut inside one would change the text."""
        counts = range(len(self._pending) - 1, len(self._pending) - 5, -1)
        heads = [self._tokenizer.decode(self._context + self._pending[:count]) for count in counts]
        for count, head in zip(counts, heads, strict=True):
            if not head.endswith(REPLACEMENT):
                return self._release(count, head)
        for count, head in zip(counts, heads, strict=True):
            tail = self._tokenizer.decode(self._pending[count:])
            if tail and head + tail == text:
                return self._release(count, head)
        return ""


def _split_characters(tokenizer: Tokenizer, token_ids: list[int]) -> tuple[list[int], list[int]]:
    """The last tokens of a prompt whose text is whole characters, and after them those of an incomplete character.

    The beginning must lie between two characters as well: a byte-fallback decoder rejects a whole run of bytes for an
    invalid one.
    """
    for num_incomplete in range(4):
        end = len(token_ids) - num_incomplete
        for start in range(min(4, max(1, end))):
            text = tokenizer.decode(token_ids[start:end])
            if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                return token_ids[start:end], token_ids[end:]
    return token_ids, []


class StopChecker:
    """Finds stop strings in text that arrives in pieces, wherever the pieces' borders are.

    The stop string that is complete first ends the text (of two that end together, the longer one).
    """

    def __init__(self, stop: Sequence[str], include_stop_str: bool = False) -> None:
        self._stop = stop
        self._include_stop_str = include_stop_str
        self._longest = max(map(len, stop), default=0)
        self._held = ""

    def push(self, piece: str, armed: bool = True) -> tuple[str, str | None]:
        """Text that is final now, and the stop string that ended it, if any.

        Text that may be the beginning of a stop string is held back. Stop strings completed while not `armed`
        (before `min_tokens`) are text like any other.
        """
        text = self._held + piece
        stop, end = self._find(text) if armed else (None, 0)
        if stop is not None:
            self._held = ""
            return text[: end if self._include_stop_str else end - len(stop)], stop
        released = len(text) - self._unfinished(text)
        self._held = text[released:]
        return text[:released], None

    def finish(self) -> str:
        """Text held back that did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[str | None, int]:
        """The stop string that ends first among those that end after the text held back, and its end."""
        ends = []
        for stop in self._stop:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), -len(stop), stop))
        end, _, stop = min(ends, default=(0, 0, None))
        return stop, end

    def _unfinished(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
