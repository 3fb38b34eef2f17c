"""What a model is read from: names and values of tensors as transformers has them, the config, and the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvllm.errors import CheckpointError
from kvllm.files.directory import CheckpointDirectory
from kvllm.files.gguf.paths import find_gguf
from kvllm.files.tensor import CheckpointTensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Checkpoint(Protocol):
    """A model's files. Every method raises CheckpointError for what is missing, damaged or not supported.

    path: as it was given. config_file: the one that has the config.
    """

    path: Path
    config_file: Path

    def config(self) -> dict[str, Any]:
        """The keys of transformers' `config.json`."""
        ...

    def generation_config(self) -> dict[str, Any]:
        """The keys of `generation_config.json`, none if there is none."""
        ...

    def open_tensors(self) -> AbstractContextManager[Mapping[str, CheckpointTensor]]:
        """All tensors, by the names that they have in the file of a model, with or without its head."""
        ...

    def weight_files(self) -> list[Path]: ...

    def has_tokenizer(self) -> bool: ...

    def read_tokenizer(self) -> PreTrainedTokenizerBase:
        """May raise whatever transformers and tokenizers do."""
        ...

    def eos_tokens(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Texts of tokens of its tokenizer that end a text, beside those that the tokenizer names."""
        ...


def checkpoint_folder(path: Path) -> Path:
    """Where files about the model of a path lie: a directory itself, or the one that a file is in."""
    return path if path.is_dir() else path.parent


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint of a directory, or of a GGUF file. Nothing is read yet.

    Raises CheckpointError if there is neither, or a directory has several GGUF files and nothing else.
    """
    path = Path(path)
    if (file := find_gguf(path)) is not None:
        from kvllm.files.gguf.checkpoint import GGUFCheckpoint  # with numpy, a quarter of a second

        return GGUFCheckpoint(file)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a directory: give the directory of a checkpoint in Hugging Face format, a .gguf file, or "
            "the id ORG/NAME of a model on a hub"
        )
    return CheckpointDirectory(path)
