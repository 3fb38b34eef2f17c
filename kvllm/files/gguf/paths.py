"""Which GGUF file a path means, and the parts of one that was split."""

from __future__ import annotations

import re
from pathlib import Path

from kvllm.errors import CheckpointError

MAGIC = b"GGUF"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF, by its name or its first bytes."""
    if path.suffix == ".gguf":
        return not path.is_dir()
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def find_gguf(path: Path) -> Path | None:
    """The GGUF file, or the first of its parts, that `path` is or that a directory without safetensors has.

    Files of a model's image encoder, "mmproj-....gguf", do not count. Raises CheckpointError if there are several.
    """
    if not path.is_dir():
        return path if is_gguf(path) else None
    files = [file for file in sorted(path.glob("*.gguf")) if not file.name.startswith("mmproj")]
    if not files or any(path.glob("*.safetensors")):
        return None
    found = {_stem(file): file for file in reversed(files)}
    if len(found) > 1:
        names = ", ".join(sorted(file.name for file in found.values()))
        raise CheckpointError(f"{path} has several models, {names}: give the path of one of these files")
    return files[0]


def all_parts(file: Path) -> list[Path]:
    """The files of a split model in order, whichever of them is given. Raises CheckpointError if one is absent."""
    match = PART.fullmatch(file.name)
    if match is None:
        return [file]
    stem, total = match[1], int(match[3])
    parts = [file.with_name(f"{stem}-{number:05}-of-{total:05}.gguf") for number in range(1, total + 1)]
    absent = [part.name for part in parts if not part.is_file()]
    if absent or not parts:
        some = ", ".join(absent[:5]) + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
        raise CheckpointError(f"{file} is one of {total} parts, and others are absent, {some}: download them")
    return parts


def _stem(file: Path) -> str:
    match = PART.fullmatch(file.name)
    return file.name if match is None else f"{match[1]} of {match[3]}"
