"""A GGUF file, or the parts of one, as a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvllm.errors import CheckpointError
from kvllm.files.gguf.header import Header, read_header
from kvllm.files.gguf.paths import all_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvllm.files.gguf.tensors import GGUFTensor, RenamedTensor

LONGEST_VECTOR = 1 << 12
"""Numbers of a tensor that the config has, one for each frequency of RoPE."""


class GGUFCheckpoint:
    """As `Checkpoint`."""

    def __init__(self, file: Path) -> None:
        self.path = self.config_file = file

    @cached_property
    def header(self) -> Header:
        """That of all parts together. Raises CheckpointError, too, for types of tensors that are not read."""
        headers = [read_header(file) for file in self.weight_files()]
        tensors = {name: info for header in headers for name, info in header.tensors.items()}
        metadata = headers[0].metadata
        expected = metadata.get("split.tensors.count", len(tensors))
        if metadata.get("split.count", 1) not in (0, len(headers)) or len(tensors) != expected:
            raise CheckpointError(
                f"{self.path} has {metadata.get('split.count')} parts with {expected} tensors, but there are "
                f"{len(headers)} with {len(tensors)}: use the parts of one model, under the names that they had"
            )
        return Header(metadata, tensors)

    def config(self) -> dict[str, Any]:
        from kvllm.files.gguf.architectures import find_architecture
        from kvllm.files.gguf.metadata import Metadata

        try:
            architecture = find_architecture(self.header.metadata.get("general.architecture"))
            self._check_types()
            return architecture.config(Metadata(self.header, self._read_vector))
        except CheckpointError as error:
            raise _with_file(self.path, error) from None

    def generation_config(self) -> dict[str, Any]:
        return {}

    @contextmanager
    def open_tensors(self) -> Iterator[dict[str, RenamedTensor]]:
        from kvllm.files.gguf.architectures import find_architecture, renamed

        config = self.config()  # which checks the architecture and the types
        architecture = find_architecture(self.header.metadata.get("general.architecture"))
        yield dict(renamed(architecture, self.raw_tensors(), config))

    def raw_tensors(self) -> dict[str, GGUFTensor]:
        """All tensors as they lie in the file, by their names there."""
        from kvllm.files.gguf.tensors import GGUFTensor, map_file

        mapped = {file: map_file(file) for file in self.weight_files()}
        return {name: GGUFTensor.view(info, mapped[info.file]) for name, info in self.header.tensors.items()}

    def weight_files(self) -> list[Path]:
        return all_parts(self.path)

    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.tokens" in self.header.metadata

    def read_tokenizer(self) -> PreTrainedTokenizerBase:
        from kvllm.files.gguf.tokenizer import read_tokenizer

        if not self.has_tokenizer():
            raise CheckpointError(f"{self.path} has no tokenizer: give prompts as token ids, or tokenizer=DIRECTORY")
        try:
            return read_tokenizer(self.header.metadata)
        except CheckpointError as error:
            raise _with_file(self.path, error) from None

    def eos_tokens(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        from kvllm.files.gguf.tokenizer import eos_tokens

        return eos_tokens(tokenizer)

    def _check_types(self) -> None:
        from kvllm.files.gguf.tensors import TYPES

        for name, info in self.header.tensors.items():
            if info.type.name not in TYPES:
                raise CheckpointError(
                    f"{name} is of type {info.type.name}; kvllm reads {', '.join(TYPES)}: use another file of the model"
                )

    def _read_vector(self, name: str) -> list[float]:
        info = self.header.tensors[name]
        if len(info.shape) != 1 or info.shape[0] > LONGEST_VECTOR:
            raise CheckpointError(f"{name} has shape {info.shape}, but must be a vector of at most {LONGEST_VECTOR}")
        return self.raw_tensors()[name].read().tolist()


def _with_file(file: Path, error: CheckpointError) -> CheckpointError:
    text = str(error)
    return CheckpointError(text if str(file) in text else f"{file}: {text}")
