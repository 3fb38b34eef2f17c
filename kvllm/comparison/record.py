"""The file of a comparison, written whenever a variant is measured, so that a command that was cut off goes on."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct

from kvllm import __version__
from kvllm.comparison.figures import Figures
from kvllm.comparison.measurement import Result
from kvllm.comparison.texts import Text
from kvllm.errors import ConfigError
from kvllm.files.checkpoint import checkpoint_folder
from kvllm.processor import cpu_name

FILE = "compare.json"


class Record(Struct, kw_only=True):
    """All that is known.

    settings: a hash of the model, the texts and all else that results depend on, except for the variants themselves.
    variants: by name. figures: of those, once all are there.
    """

    settings: str
    provenance: dict[str, Any]
    texts: list[Text]
    variants: dict[str, Result]
    figures: dict[str, Figures] = {}

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / FILE, self)


def write_json(path: Path, found: Struct) -> None:
    """All or nothing of it."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    os.replace(new, path)


def read_record(directory: Path, settings: str) -> Record | None:
    """What an earlier command has found with the same settings. None where there is none.

    Raises ConfigError for a file of other settings, which would be lost.
    """
    path = directory / FILE
    if not path.is_file():
        return None
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Record)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no comparison ({error}): give another --output, or --fresh") from None
    if found.settings != settings:
        raise ConfigError(
            f"{path} is of another model, text or setting: give another --output, or --fresh to replace it"
        )
    return found


def hash_of(*parts: Any) -> str:
    return hashlib.sha256(msgspec.json.encode((__version__, *parts), order="deterministic")).hexdigest()[:16]


def model_files(path: Path) -> list[tuple[str, int, int]]:
    """The files of a checkpoint and those beside it, told apart by their sizes and times."""
    files = (
        file for file in sorted(checkpoint_folder(path).iterdir()) if file.is_file() and not file.name.startswith(".")
    )
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def provenance(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kvllm": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "arguments": msgspec.to_builtins(dict(arguments), enc_hook=str),
    }
