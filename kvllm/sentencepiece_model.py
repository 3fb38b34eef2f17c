"""A SentencePiece model (`tokenizer.model`) as a tokenizer of the tokenizers library, which encodes the same.

transformers converts such a file by the class that the checkpoint names, and then ignores what the file says about
spaces. Here the file decides.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import generate_merges, import_protobuf

from kvllm.errors import CheckpointError

SPACE = "\u2581"
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Numbers of sentencepiece_model.proto."""


class SentencePieceModel:
    """What the file says.

    pieces: the tokens' texts, by their ids. special_tokens: "bos_token", "eos_token" and "unk_token", where there are.
    """

    def __init__(self, file: Path) -> None:
        messages: Any = import_protobuf()
        proto = messages.ModelProto()
        with suppress(Exception):  # a DecodeError, whose class depends on the version of protobuf
            proto.ParseFromString(file.read_bytes())
        if not proto.pieces:
            raise CheckpointError(f"{file} is not a SentencePiece model: add a tokenizer.json")
        if proto.trainer_spec.model_type not in (UNIGRAM, BPE) or proto.trainer_spec.treat_whitespace_as_suffix:
            raise CheckpointError(
                f"{file} is a SentencePiece model of words or characters, or with spaces after words, which kvllm "
                "does not read: add a tokenizer.json"
            )
        self._trainer, self._normalizer = proto.trainer_spec, proto.normalizer_spec
        self._types = [piece.type for piece in proto.pieces]
        self._scores = [piece.score for piece in proto.pieces]
        self.pieces = [piece.piece for piece in proto.pieces]
        ids = {"bos_token": self._trainer.bos_id, "eos_token": self._trainer.eos_id, "unk_token": self._trainer.unk_id}
        self.special_tokens = {name: self.pieces[i] for name, i in ids.items() if 0 <= i < len(self.pieces)}

    def convert(self, added: dict[int, str], prefix: bool, prefix_everywhere: bool) -> Tokenizer:
        """The tokenizer, without tokens that it puts before or after a text.

        added: texts of tokens by their ids, after the file's or instead of some. prefix: a text begins with a space,
            if the file says so; prefix_everywhere: so does text after a special token.
        """
        prefix = prefix and self._normalizer.add_dummy_prefix
        prefix_everywhere |= self._normalizer.remove_extra_whitespaces  # spaces there mean nothing
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
                AddedToken(piece, normalized=kind == USER_DEFINED and not prefix, special=kind == CONTROL)
                for piece, kind in zip(pieces, self._types, strict=False)
                if kind in (CONTROL, USER_DEFINED)
            ]
        )
        return tokenizer

    def _pieces(self, added: dict[int, str]) -> list[str]:
        count = max([len(self.pieces), *(token_id + 1 for token_id in added)])
        known = dict(enumerate(self.pieces)) | added
        return [known.get(token_id, f"<unused_{token_id}>") for token_id in range(count)]

    def _model(self, pieces: list[str]) -> Any:
        fallback, unknown = self._trainer.byte_fallback, self._trainer.unk_id
        normal = [kind == NORMAL for kind in self._types] + [False] * (len(pieces) - len(self._types))
        if self._trainer.model_type == UNIGRAM:
            # The others are no pieces of a text, so it is better to take their characters, such as the six of "<0x0A>".
            worst = 6 * min(self._scores) - 100
            scores = [self._scores[i] if is_normal else worst for i, is_normal in enumerate(normal)]
            return models.Unigram(list(zip(pieces, scores, strict=True)), unknown, fallback)
        vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
        scores = [
            (piece, score) for piece, score, is_normal in zip(pieces, self._scores, normal, strict=False) if is_normal
        ]
        others = {piece for piece, is_normal in zip(pieces, normal, strict=True) if not is_normal}
        merges = generate_merges(vocab, scores, others)
        return models.BPE(vocab=vocab, merges=merges, unk_token=pieces[unknown], fuse_unk=True, byte_fallback=fallback)

    def _normalizers(self) -> list[Any]:
        steps: list[Any] = []
        if self._normalizer.precompiled_charsmap:
            steps.append(normalizers.Precompiled(self._normalizer.precompiled_charsmap))
        if self._normalizer.remove_extra_whitespaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        return steps
