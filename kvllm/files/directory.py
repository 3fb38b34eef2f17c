"""A checkpoint in Hugging Face format: a directory with config.json, weights as safetensors, and a tokenizer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from kvllm.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_FILE = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
# One of these must be there, complete. Without its vocabulary, transformers builds a tokenizer without words.
VOCABULARIES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


class CheckpointDirectory:
    """As `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"

    def config(self) -> dict[str, Any]:
        if not self.config_file.is_file():
            raise CheckpointError(
                f"{self.path} has no config.json: give the directory of a checkpoint in Hugging Face format"
            )
        return _read_json(self.config_file)

    def generation_config(self) -> dict[str, Any]:
        file = self.path / "generation_config.json"
        return _read_json(file) if file.is_file() else {}

    @contextmanager
    def open_tensors(self) -> Iterator[dict[str, SafetensorsTensor]]:
        with ExitStack() as stack:
            found = {}
            for file in _find_files(self.path):
                opened = stack.enter_context(_open(file))
                found |= {name: SafetensorsTensor(file, opened.get_slice(name)) for name in sorted(opened.keys())}
            yield found

    def weight_files(self) -> list[Path]:
        return sorted(self.path.glob("*.safetensors"))

    def has_tokenizer(self) -> bool:
        return any(all((self.path / name).is_file() for name in names) for names in VOCABULARIES)

    def read_tokenizer(self) -> PreTrainedTokenizerBase:
        if not self.has_tokenizer():
            allowed = ", or ".join(" with ".join(names) for names in VOCABULARIES)
            raise CheckpointError(
                f"{self.path} has no tokenizer: {allowed} is needed. Add the files, or give prompts as token ids"
            )
        from kvllm.tokenizer_files import read_tokenizer  # with transformers, which takes a second

        return read_tokenizer(self.path)

    def eos_tokens(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        from kvllm.tokenizer_files import eos_tokens

        return list(eos_tokens(self.path))


class SafetensorsTensor:
    """As `CheckpointTensor`."""

    def __init__(self, file: Path, view: Any) -> None:
        self.file = file
        self._view = view

    @property
    def dtype(self) -> str:
        return self._view.get_dtype()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._view.get_shape())

    @cached_property
    def _mapped(self) -> torch.Tensor:
        """A view of the file, of which nothing is read yet."""
        return self._view[...]

    def read(self, rows: slice | torch.Tensor | None = None) -> torch.Tensor:
        return self._mapped if rows is None else self._mapped[rows]

    def forget(self) -> None:
        from kvllm.memory_pages import forget_pages

        forget_pages(self._mapped)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def some(names: list[str]) -> str:
    """The first few of many names."""
    rest = len(names) - 5
    return ", ".join(names[:5]) + (f" and {rest} more" if rest > 0 else "")


def _read_json(file: Path) -> dict[str, Any]:
    """Infinity, which is no JSON, but was written by transformers, becomes what it writes today."""
    try:
        found = json.loads(file.read_bytes(), parse_constant=lambda name: {"__float__": name})
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}): download it again") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} must have an object, but has {found!r:.80}")
    return found


def _find_files(path: Path) -> list[Path]:
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    indexed = (path / INDEX_FILE).is_file()
    if names := _indexed_files(path / INDEX_FILE) if indexed else _numbered_files(path):
        absent = [name for name in names if not os.path.isfile(path / name)]
        if absent:
            source = f"{INDEX_FILE} names files that are absent" if indexed else "shards of the weights are absent"
            raise CheckpointError(f"{path}: {source}, {some(absent)}: download them")
        return [path / name for name in names]
    pickled = sorted(file.name for suffix in ("bin", "pt", "pth") for file in path.glob(f"*.{suffix}"))
    if pickled:
        raise CheckpointError(
            f"{path} has its weights in {some(pickled)} only. kvllm never loads weights from pickle, which can run "
            "any code: convert them to safetensors (load with transformers, then save_pretrained)"
        )
    raise CheckpointError(
        f"{path} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} nor model-00001-of-....safetensors"
    )


def _numbered_files(path: Path) -> list[str]:
    """All shards of a checkpoint without an index, by the number of them that stands in the name of each."""
    found = [match for name in sorted(os.listdir(path)) if (match := SHARD_FILE.fullmatch(name))]
    totals = {match[2] for match in found}
    if len(totals) > 1:
        names = [match[0] for match in found]
        raise CheckpointError(f"{path} has shards of several checkpoints, {some(names)}: remove those of the others")
    return [f"model-{number:05}-of-{total}.safetensors" for total in totals for number in range(1, int(total) + 1)]


def _indexed_files(file: Path) -> list[str]:
    """The files that an index names, relative to its folder. They may be links, as in the Hugging Face hub's cache."""
    try:
        names = sorted(set(msgspec.json.decode(file.read_bytes(), type=_Index).weight_map.values()))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not an index of safetensors files: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    outside = [name for name in names if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    if outside:
        raise CheckpointError(
            f"{file} names files outside of the checkpoint's folder, {some(outside)}: use a checkpoint from a source "
            "that you trust, or put the files into the folder and their names alone into the index"
        )
    return names


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open  # the latter imports torch

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}): it is damaged or incomplete, download it again"
        ) from error
