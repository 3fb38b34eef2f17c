"""Tokenizers from the files of a checkpoint: from tokenizer.json as it is, or from a SentencePiece model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvllm.sentencepiece_model import SentencePieceModel

JSON_FILE, SENTENCEPIECE_FILE = "tokenizer.json", "tokenizer.model"
CONFIG_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


class ConvertedTokenizer(PreTrainedTokenizerFast):
    """Gets its vocabulary from its caller, and looks for none among the files."""

    vocab_files_names: dict[str, str] = {"tokenizer_file": JSON_FILE}  # noqa: RUF012


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory. Raises as transformers, tokenizers and msgspec do, and CheckpointError."""
    if (path / JSON_FILE).is_file():
        return _from_json(path)
    if (path / SENTENCEPIECE_FILE).is_file():
        return _from_sentencepiece(path)
    from transformers import AutoTokenizer  # takes a third of a second

    return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def eos_tokens(path: Path) -> Iterator[str]:
    """The texts of tokens that the tokenizer's files say end a text. transformers reads one of the two files."""
    for name in (CONFIG_FILE, SPECIAL_TOKENS_FILE):
        token = _json_object(path / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            yield text


def _from_json(path: Path) -> PreTrainedTokenizerBase:
    """Encodes as tokenizer.json says, whatever class and settings stand beside it.

    transformers would add tokens that other files name, put others before and after a text, and split the texts of
    some models in another way. It does so to an empty tokenizer here.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True, tokenizer_object=Backend(BPE()))
    tokenizer._tokenizer = Backend.from_file(str(path / JSON_FILE))
    return tokenizer


def _from_sentencepiece(path: Path) -> PreTrainedTokenizerBase:
    """What the model does not say are settings: which tokens were added to it, and what stands around a text.

    Where they are absent, too, it is as with Llama 2: a token before a text, and a space after a special token.
    """
    settings = _json_object(path / CONFIG_FILE)
    named = {**_json_object(path / SPECIAL_TOKENS_FILE), **settings}
    model = SentencePieceModel.read(path / SENTENCEPIECE_FILE)
    prefix, everywhere = (settings.get(name) is not False for name in ("add_prefix_space", "legacy"))
    return ConvertedTokenizer.from_pretrained(
        path,
        local_files_only=True,
        tokenizer_object=model.convert(_added_tokens(path, settings), prefix, everywhere),
        add_bos_token=settings.get("add_bos_token") is not False,
        add_eos_token=settings.get("add_eos_token") is True,
        **{name: token for name, token in model.special_tokens.items() if name not in named},
    )


def _added_tokens(path: Path, settings: dict[str, Any]) -> dict[int, str]:
    """Texts by ids. The older file has them the other way round."""
    if "added_tokens_decoder" in settings:
        return {int(token_id): token["content"] for token_id, token in settings["added_tokens_decoder"].items()}
    return {token_id: text for text, token_id in _json_object(path / ADDED_TOKENS_FILE).items()}


def _json_object(file: Path) -> dict[str, Any]:
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]) if file.is_file() else {}
