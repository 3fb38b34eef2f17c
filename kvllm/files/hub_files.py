"""Which files of a hub's repository are read: each weight once, and nothing that no part of KvLLM opens."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from kvllm.errors import CheckpointError
from kvllm.spelling import did_you_mean

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    INDEX_FILE,
    "modules.json",
    "*_Pooling/config.json",
    "*_Dense/config.json",
    "*_Dense/model.safetensors",
    "*_LogitScore/config.json",
    "kv_*.json",
    "kv_*.safetensors",
)
"""All that is read of a checkpoint but its weights."""
TOKENIZER_FILES = frozenset(("tokenizer.json", "tokenizer.model", "vocab.json"))
"""Of which a checkpoint with a tokenizer has one."""
GGUF_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
QUANTIZATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|MXFP\d|NVFP\d|BF16|FP?16|FP?32)\w*)$", re.IGNORECASE)
NO_MODEL = re.compile(r"mmproj.*|imatrix.*|.*[-._]imatrix")
"""Names of GGUF files that are no language models."""
NOT_READ = re.compile(r"(?:UD-)?(?:IQ[1-3]|TQ|NVFP)\w*", re.IGNORECASE)
"""Tags of models with types that kvllm does not read."""
MEMORY_SHARE = 0.75
"""Of the machine's memory, for weights; the rest is for the KV pool and what else runs there."""
GIB = 1 << 30


class Quantization(NamedTuple):
    """A model in GGUF.

    tag: such as Q4_K_M; the file's name where it tells none. name: without the number of its part. files: all parts, in
    order. size: bytes.
    """

    tag: str
    name: str
    files: tuple[str, ...]
    size: int


def description(names: Collection[str]) -> list[str]:
    """The files of a checkpoint but its weights."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in DESCRIPTION)]


def has_safetensors(names: Collection[str]) -> bool:
    return SINGLE_FILE in names or INDEX_FILE in names or any(map(SHARD.fullmatch, names))


def safetensors(names: Collection[str], folder: Path) -> list[str]:
    """The files with the weights.

    names: of all files. folder: where the index lies, if there is one.

    Raises:
        CheckpointError: the index is malformed, or names other files.
    """
    if SINGLE_FILE in names:
        return [SINGLE_FILE]
    if INDEX_FILE not in names:
        return sorted(filter(SHARD.fullmatch, names))
    try:
        shards = set(msgspec.json.decode((folder / INDEX_FILE).read_bytes(), type=_Index).weight_map.values())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / INDEX_FILE} is not an index of safetensors files: {error}") from error
    if absent := sorted(shards.difference(names)):
        raise CheckpointError(
            f"{folder / INDEX_FILE} names files that are absent, {some(absent)}: use another revision, or another "
            "repository"
        )
    return sorted(shards)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def quantizations(sizes: Mapping[str, int]) -> list[Quantization]:
    """The models in GGUF, the smallest first.

    sizes: bytes of all files of a repository.
    """
    parts: dict[str, list[str]] = {}
    for file in sorted(sizes):
        path = PurePosixPath(file)
        if path.suffix == ".gguf" and not NO_MODEL.fullmatch(path.stem):
            found = GGUF_SHARD.fullmatch(path.stem)
            parts.setdefault(str(path.with_name(found[1] if found else path.stem)), []).append(file)
    return sorted((_quantization(path, files, sizes) for path, files in parts.items()), key=lambda each: each.size)


def _quantization(path: str, files: Sequence[str], sizes: Mapping[str, int]) -> Quantization:
    name = PurePosixPath(path).name
    found = QUANTIZATION.search(name)
    return Quantization(found[1] if found else name, name, tuple(files), sum(sizes[file] for file in files))


def choose(repo: str, found: Sequence[Quantization], tag: str | None, memory: int) -> Quantization:
    """One of several models in GGUF: the one that was asked for, or the largest that fits, of 16 bits at most.

    tag: a quantization, or the name of a file. memory: bytes of the device.

    Raises:
        CheckpointError: the tag names none of them, or several, or all are too large.
    """
    if tag is not None:
        return _tagged(repo, found, tag)
    room = int(memory * MEMORY_SHARE)
    known = [each for each in found if not NOT_READ.fullmatch(each.tag)] or found
    smaller = [each for each in known if "32" not in each.tag] or known
    fitting = [each for each in smaller if each.size <= room]
    if not fitting:
        least = smaller[0]
        raise CheckpointError(
            f"the smallest model of {repo}, {least.tag}, has {gib(least.size)}, and weights may take {gib(room)} of "
            f"this machine's memory: use a smaller model, or insist with {repo}:{least.tag}"
        )
    return fitting[-1]


def _tagged(repo: str, found: Sequence[Quantization], tag: str) -> Quantization:
    named = [each for each in found if tag.lower() in (each.tag.lower(), each.name.lower())]
    if len(named) == 1:
        return named[0]
    if named:
        names = ", ".join(f"{repo}:{each.name}" for each in named)
        raise CheckpointError(f"{repo} has several models in {tag}: choose one of {names}")
    if not found:
        raise CheckpointError(f"{repo}:{tag} names a quantization, and {repo} has no GGUF files: leave :{tag} out")
    tags = [each.tag for each in found]
    near = did_you_mean(tag, tags)
    raise CheckpointError(f"{repo} has no {tag}{near or ''}: choose one of {', '.join(tags)}")


def refuse_other_weights(repo: str, names: Collection[str]) -> None:
    """Raise CheckpointError for a repository without weights of a known kind."""
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".npz"))]
    others += [name for name in names if name.endswith(".safetensors") and not name.startswith("kv_")]
    has = f"its weights in {some(sorted(others))} only" if others else f"only {some(sorted(names)) or 'no files'}"
    raise CheckpointError(
        f"{repo} has {has}: kvllm reads {SINGLE_FILE}, {INDEX_FILE} with its shards, or .gguf. Use a repository that "
        "has them, or convert the weights (load with transformers, then save_pretrained) and give the directory"
    )


def some(names: Sequence[str]) -> str:
    """The first few of many names."""
    rest = len(names) - 5
    return ", ".join(names[:5]) + (f" and {rest} more" if rest > 0 else "")


def gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB"
