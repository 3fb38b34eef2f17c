"""Fills a model with the weights of a checkpoint in safetensors format, or with random ones.

Every tensor's name, dtype and shape is checked from the files' headers before the model is allocated. A rank reads its
own part of each tensor, straight into the model's memory; weights are packed one by one afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from kvllm.errors import CheckpointError, ConfigError
from kvllm.models import model_family
from kvllm.models.base import Decoder
from kvllm.models.config import ModelConfig
from kvllm.models.layers import Weight
from kvllm.models.weights import Packing
from kvllm.parallel import Shard

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
READABLE_DTYPES = ("BF16", "F16", "F32", "F64")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Tensors = dict[str, tuple[Path, Any]]
"""Every tensor of a checkpoint by name: its file, and a view of it that reads what is sliced."""


def load_model(
    path: Path,
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    bits: int | None = None,
) -> Decoder:
    """The model of the directory `path`, converted to `dtype`, or with weights of 8 or 4 `bits`.

    Raises CheckpointError if there are no safetensors files, one lies outside of `path` or cannot be read, or they hold
    other tensors than `config` implies; ConfigError if the ranks cannot share the model out equally.
    """
    files = _find_files(path)
    with ExitStack() as stack:
        found = _tensors([(file, stack.enter_context(_open(file))) for file in files])
        without_memory = _empty_model(config, shard, dtype, torch.device("meta"), max_model_len=1)
        _check(without_memory.weights(), found, config.tie_word_embeddings)
        model = _empty_model(config, shard, dtype, device, max_model_len)
        _fill(model.weights(), found, config.tie_word_embeddings)
    model.pack(Packing(bits))
    return model


def random_model(
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    seed: int,
    bits: int | None = None,
    std: float = 0.02,
) -> Decoder:
    """A model with normally distributed weights (norms are one), for measurements: the same on any number of ranks."""
    model = _empty_model(config, shard, dtype, device, max_model_len)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.weights().items():
        if name.endswith("norm.weight"):
            weight.target.fill_(1)
            continue
        values = torch.empty(weight.shape, dtype=dtype, device=device).normal_(0, std, generator=generator)
        weight.target.copy_(values.narrow(weight.dim, weight.start, weight.target.shape[weight.dim]))
    model.pack(Packing(bits))
    return model


def _empty_model(
    config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> Decoder:
    if device.type == "cpu" and dtype == torch.float16:
        raise ConfigError("dtype float16 is not computed on the CPU: use bfloat16 or float32")
    return model_family(config.architecture).build(config, shard, dtype, device, max_model_len)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _find_files(path: Path) -> list[Path]:
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    if (path / INDEX_FILE).is_file():
        names = _indexed_files(path / INDEX_FILE)
        absent = [name for name in names if not os.path.isfile(path / name)]
        if absent:
            raise CheckpointError(f"{path}: {INDEX_FILE} names files that are absent, {_some(absent)}: download them")
        return [path / name for name in names]
    pickled = sorted(file.name for suffix in ("bin", "pt", "pth") for file in path.glob(f"*.{suffix}"))
    if pickled:
        raise CheckpointError(
            f"{path} has its weights in {_some(pickled)} only. kvllm never loads weights from pickle, which can run "
            "any code: convert them to safetensors (load with transformers, then save_pretrained)"
        )
    raise CheckpointError(f"{path} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")


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
            f"{file} names files outside of the checkpoint's folder, {_some(outside)}: use a checkpoint from a source "
            "that you trust, or put the files into the folder and their names alone into the index"
        )
    return names


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}): it is damaged or incomplete, download it again"
        ) from error


def _tensors(files: list[tuple[Path, Any]]) -> Tensors:
    return {name: (file, opened.get_slice(name)) for file, opened in files for name in sorted(opened.keys())}


def _check(weights: dict[str, Weight], found: Tensors, tied: bool) -> None:
    """Raise CheckpointError unless the tensors are those of the model."""
    _check_names(weights, found, tied)
    for name, weight in weights.items():
        _check_tensor(name, *found[name], weight)
    if tied and HEAD in found:
        _check_tensor(HEAD, *found[HEAD], weights[EMBEDDING])


def _fill(weights: dict[str, Weight], found: Tensors, tied: bool) -> None:
    for name, weight in weights.items():
        weight.target.copy_(_part(found[name][1], weight))
    if tied and HEAD in found:
        file, head = found[HEAD]
        embedding = weights[EMBEDDING]
        part = _part(head, embedding).to(embedding.target)
        if not torch.equal(part, embedding.target):
            raise CheckpointError(
                f"{file}: {HEAD} differs from {EMBEDDING}, but config.json says that they are one: set "
                "tie_word_embeddings to false in it"
            )


def _check_names(weights: dict[str, Weight], found: Iterable[str], tied: bool) -> None:
    def ignored(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (tied and name == HEAD)

    missing = [name for name in weights if name not in found]
    unexpected = [name for name in found if name not in weights and not ignored(name)]
    if missing or unexpected:
        parts = [f"{text} {_some(names)}" for text, names in (("lacks", missing), ("has unknown", unexpected)) if names]
        raise CheckpointError(f"the checkpoint does not fit its config.json: it {' and '.join(parts)}")


def _check_tensor(name: str, file: Path, found: Any, weight: Weight) -> None:
    shape = tuple(found.get_shape())
    if shape != weight.shape:
        raise CheckpointError(f"{file}: {name} has shape {shape}, but config.json implies {weight.shape}")
    if found.get_dtype() not in READABLE_DTYPES:
        raise CheckpointError(
            f"{file}: {name} has dtype {found.get_dtype()}; kvllm reads {', '.join(READABLE_DTYPES)}: "
            "use the checkpoint that is not quantized"
        )


def _part(source: Any, weight: Weight) -> torch.Tensor:
    """This rank's part of a tensor in a file."""
    part = slice(weight.start, weight.start + weight.target.shape[weight.dim])
    return source[part] if weight.dim == 0 else source[:, part]


def _some(names: list[str]) -> str:
    """The first few of many names."""
    rest = len(names) - 5
    return ", ".join(names[:5]) + (f" and {rest} more" if rest > 0 else "")
