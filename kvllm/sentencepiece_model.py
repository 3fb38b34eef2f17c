"""A SentencePiece model (`tokenizer.model`, or as GGUF files have it) as a tokenizer of the tokenizers library, which
encodes the same.

transformers converts such a file by the class that the checkpoint names, and then ignores what the file says about
spaces. Here the file decides.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import import_protobuf

from kvllm.errors import CheckpointError

SPACE = "\u2581"
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Numbers of sentencepiece_model.proto."""


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """What the file says.

    pieces, types, scores: of the tokens, by their ids. special_tokens: "bos_token", "eos_token" and "unk_token", where
    there are. unigram: not BPE. unknown: the token in the place of what has none. byte_fallback: its bytes have.
    prefix: a text begins with a space. trims: spaces around a text, and several in a row, mean nothing.
    right_stripped: special tokens that take the spaces after them, too.
    """

    pieces: list[str]
    types: list[int]
    scores: list[float]
    special_tokens: dict[str, Any]
    unigram: bool = False
    unknown: int = 0
    byte_fallback: bool = False
    prefix: bool = True
    trims: bool = False
    charsmap: bytes = b""
    right_stripped: frozenset[str] = frozenset()

    @classmethod
    def read(cls, file: Path) -> SentencePieceModel:
        """Raises CheckpointError for what is no such file, or is not read."""
        messages: Any = import_protobuf()
        proto = messages.ModelProto()
        with suppress(Exception):  # a DecodeError, whose class depends on the version of protobuf
            proto.ParseFromString(file.read_bytes())
        if not proto.pieces:
            raise CheckpointError(f"{file} is not a SentencePiece model: add a tokenizer.json")
        trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
        if trainer.model_type not in (UNIGRAM, BPE) or trainer.treat_whitespace_as_suffix:
            raise CheckpointError(
                f"{file} is a SentencePiece model of words or characters, or with spaces after words, which kvllm "
                "does not read: add a tokenizer.json"
            )
        pieces = [piece.piece for piece in proto.pieces]
        ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
        return cls(
            pieces=pieces,
            types=[piece.type for piece in proto.pieces],
            scores=[piece.score for piece in proto.pieces],
            special_tokens={name: pieces[i] for name, i in ids.items() if 0 <= i < len(pieces)},
            unigram=trainer.model_type == UNIGRAM,
            unknown=trainer.unk_id,
            byte_fallback=trainer.byte_fallback,
            prefix=normalizer.add_dummy_prefix,
            trims=normalizer.remove_extra_whitespaces,
            charsmap=normalizer.precompiled_charsmap,
        )

    def convert(self, added: dict[int, str], prefix: bool, prefix_everywhere: bool) -> Tokenizer:
        """The tokenizer, without tokens that it puts before or after a text.

        added: texts of tokens by their ids, after the file's or instead of some. prefix: a text begins with a space,
            if the file says so; prefix_everywhere: so does text after a special token.
        """
        prefix = prefix and self.prefix
        prefix_everywhere |= self.trims  # spaces there mean nothing
        pieces = self._pieces(added)
        tokenizer = Tokenizer(self._model(pieces))
        steps = self._normalizers()
        if prefix and prefix_everywhere:
            steps.append(normalizers.Prepend(SPACE))
        elif prefix:
            # Two steps, because one would put no mark before a text that begins with it.
            first = pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False)
            mark = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, mark])
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        start = [decoders.Strip(" ", 1, 0)] if prefix else []
        whole = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*whole, *start])
        # Spaces are among a text's symbols only once it is normalized, and a prefix would change the symbols, too.
        tokenizer.add_tokens(
            [
                AddedToken(
                    piece,
                    normalized=kind == USER_DEFINED and not prefix,
                    special=kind == CONTROL,
                    rstrip=piece in self.right_stripped,
                )
                for piece, kind in zip(pieces, self.types, strict=False)
                if kind in (CONTROL, USER_DEFINED)
            ]
        )
        return tokenizer

    def _pieces(self, added: dict[int, str]) -> list[str]:
        count = max([len(self.pieces), *(token_id + 1 for token_id in added)])
        known = dict(enumerate(self.pieces)) | added
        return [known.get(token_id, f"<unused_{token_id}>") for token_id in range(count)]

    def _model(self, pieces: list[str]) -> Any:
        fallback, unknown = self.byte_fallback, self.unknown
        normal = [kind == NORMAL for kind in self.types] + [False] * (len(pieces) - len(self.types))
        if self.unigram:
            # The others are no pieces of a text, so it is better to take their characters, such as the six of "<0x0A>".
            worst = 6 * min(self.scores) - 100
            scores = [self.scores[i] if is_normal else worst for i, is_normal in enumerate(normal)]
            return models.Unigram(list(zip(pieces, scores, strict=True)), unknown, fallback)
        vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
        scores = dict(compress(zip(pieces, self.scores, strict=False), normal))
        for piece, is_normal in zip(pieces, normal, strict=True):
            if not is_normal:
                scores.pop(piece, None)
        merges = merges_of(scores)
        return models.BPE(vocab=vocab, merges=merges, unk_token=pieces[unknown], fuse_unk=True, byte_fallback=fallback)

    def _normalizers(self) -> list[Any]:
        steps: list[Any] = []
        if self.charsmap:
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.trims:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        return steps


def merges_of(scores: dict[str, float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the one with the best score first; then the longest left and right.

    As `generate_merges` of transformers, which tries each cut of each piece in Python: seconds for a large vocabulary.
    """
    pieces = list(scores)
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    parts = _PartsOfText("".join(pieces))
    whole = parts.hashes(starts, ends)
    order = np.argsort(whole)
    whole = whole[order]

    def pieces_of(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The piece with each hash, and whether there is one."""
        places = np.minimum(np.searchsorted(whole, hashes), len(whole) - 1)
        return order[places], whole[places] == hashes

    of = np.repeat(np.arange(len(pieces)), lengths)
    cuts = np.flatnonzero(np.arange(len(of)) != starts[of])
    of = of[cuts]
    left, known = pieces_of(parts.hashes(starts[of], cuts))
    left, of, cuts = left[known], of[known], cuts[known]
    right, known = pieces_of(parts.hashes(cuts, ends[of]))
    left, right, of = left[known], right[known], of[known]
    best = np.lexsort((-lengths[right], -lengths[left], -np.fromiter(scores.values(), float, len(pieces))[of]))
    lefts, rights = (map(pieces.__getitem__, side[best].tolist()) for side in (left, right))
    return list(zip(lefts, rights, strict=True))


class _PartsOfText:
    """Hashes of parts of a text, many at once: polynomials modulo 2 ** 64 of a part's characters."""

    BASE = 0x9E3779B97F4A7C15

    def __init__(self, text: str) -> None:
        characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
        powers, self.inverses = (_powers(base, len(text) + 1) for base in (self.BASE, pow(self.BASE, -1, 1 << 64)))
        self.sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum((characters + np.uint64(1)) * powers[:-1])))

    def hashes(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        return (self.sums[ends] - self.sums[begins]) * self.inverses[begins]


def _powers(base: int, count: int) -> np.ndarray:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)
