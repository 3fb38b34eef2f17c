"""Fills a model with the weights of a checkpoint in safetensors format, or with random ones.

Every tensor's name, dtype and shape is checked from the files' headers before the model is allocated. A rank reads its
own part of each tensor, some rows at a time, and packs them at once, so that no second copy of the weights is held.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from kvllm.errors import CheckpointError, ConfigError
from kvllm.memory_pages import forget_pages
from kvllm.models import model_family
from kvllm.models.base import Decoder
from kvllm.models.config import ModelConfig
from kvllm.models.expert_stacks import ExpertMatrices
from kvllm.models.layers import Weight
from kvllm.models.quantized_tensors import Stored, read_float8, read_integers, read_mxfp4, stored_tensors
from kvllm.models.weight_format import WeightFormat
from kvllm.models.weights import Packing, strips
from kvllm.parallel import Shard

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_FILE = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
READABLE_DTYPES = ("BF16", "F16", "F32", "F64")
EMBEDDING, HEAD, BASE = "model.embed_tokens.weight", "lm_head.weight", "model."

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
        stored = _stored(without_memory.weights(), config)
        found = _without_zero_biases(found, stored)
        _check(stored, found, config.tie_word_embeddings)
        if config.tie_word_embeddings and HEAD in found:
            _check_tied_head(without_memory.weights()[EMBEDDING], found, dtype)
        model = _empty_model(config, shard, dtype, device, max_model_len)
        model.allocate(Packing(bits, config.weight_format))
        for name, weight in model.weights().items():
            if config.weight_format and weight.is_quantized(config.weight_format):
                _read_quantized(name, weight, config.weight_format, found)
                continue
            for first, rows in _strips(found[name][1], weight):
                weight.write(first, rows)
    model.compile()
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
    if config.weight_format:
        raise ConfigError('load_format="dummy" makes no quantized weights: take quantization_config out of config.json')
    model = _empty_model(config, shard, dtype, device, max_model_len)
    model.allocate(Packing(bits))
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.weights().items():
        if isinstance(weight.target, torch.Tensor) and name.endswith("norm.weight"):
            weight.target.fill_(1)
            continue
        drawn = _random_strips(weight.shape, dtype, device, generator, std)
        if weight.order is not None:
            weight.write(0, torch.cat([values for _, values in drawn])[weight.order.to(device)])
            continue
        rows = weight.rows(0, weight.target.shape[0])
        assert isinstance(rows, slice)
        for first, values in drawn:
            begin, end = max(first, rows.start), min(first + len(values), rows.stop)
            if begin < end:
                weight.write(begin - rows.start, values[begin - first : end - first])
    model.compile()
    return model


def _random_strips(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator, std: float
) -> Iterator[tuple[int, torch.Tensor]]:
    """A random tensor, some rows at a time: the first one's index, and the rows."""
    for first, last in strips(shape[0], math.prod(shape[1:])):
        values = torch.empty(last - first, *shape[1:], dtype=dtype, device=device)
        yield first, values.normal_(0, std, generator=generator)


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
    indexed = (path / INDEX_FILE).is_file()
    if names := _indexed_files(path / INDEX_FILE) if indexed else _numbered_files(path):
        absent = [name for name in names if not os.path.isfile(path / name)]
        if absent:
            source = f"{INDEX_FILE} names files that are absent" if indexed else "shards of the weights are absent"
            raise CheckpointError(f"{path}: {source}, {_some(absent)}: download them")
        return [path / name for name in names]
    pickled = sorted(file.name for suffix in ("bin", "pt", "pth") for file in path.glob(f"*.{suffix}"))
    if pickled:
        raise CheckpointError(
            f"{path} has its weights in {_some(pickled)} only. kvllm never loads weights from pickle, which can run "
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
        raise CheckpointError(f"{path} has shards of several checkpoints, {_some(names)}: remove those of the others")
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
    """All tensors by the names that they have in a whole model. Those saved from its base class lack the prefix."""
    found = {name: (file, opened.get_slice(name)) for file, opened in files for name in sorted(opened.keys())}
    if any(name.startswith(BASE) for name in found):
        return found
    return {name if name == HEAD else BASE + name: tensor for name, tensor in found.items()}


def _stored(weights: dict[str, Weight], config: ModelConfig) -> dict[str, Stored]:
    """The tensors that a checkpoint must have."""
    stored = {}
    for name, weight in weights.items():
        if config.weight_format and weight.is_quantized(config.weight_format):
            stored |= stored_tensors(config.weight_format, _module(name), weight.shape)
        else:
            stored[name] = Stored(READABLE_DTYPES, (weight.shape,))
    return stored


def _check(stored: dict[str, Stored], found: Tensors, tied: bool) -> None:
    """Raise CheckpointError unless the tensors are those of the model."""
    _check_names(stored, found, tied)
    for name, tensor in stored.items():
        _check_tensor(name, *found[name], tensor)
    if tied and HEAD in found:
        _check_tensor(HEAD, *found[HEAD], stored[EMBEDDING])


def _check_tied_head(embedding: Weight, found: Tensors, dtype: torch.dtype) -> None:
    """Raise CheckpointError unless the head that a file has is the embedding, which the model computes with."""
    (file, head), (_, own) = found[HEAD], found[EMBEDDING]
    for (_, rows), (_, expected) in zip(_strips(head, embedding), _strips(own, embedding), strict=True):
        if not torch.equal(rows.to(dtype), expected.to(dtype)):
            raise CheckpointError(
                f"{file}: {HEAD} differs from {EMBEDDING}, but config.json says that they are one: set "
                "tie_word_embeddings to false in it"
            )


def _check_names(stored: Iterable[str], found: Iterable[str], tied: bool) -> None:
    def ignored(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (tied and name == HEAD)

    expected = set(stored)
    missing = [name for name in stored if name not in found]
    unexpected = [name for name in found if name not in expected and not ignored(name)]
    if missing or unexpected:
        parts = [f"{text} {_some(names)}" for text, names in (("lacks", missing), ("has unknown", unexpected)) if names]
        raise CheckpointError(f"the checkpoint does not fit its config.json: it {' and '.join(parts)}")


def _without_zero_biases(found: Tensors, stored: Iterable[str]) -> Tensors:
    """Many checkpoints have a bias of zeros for projections that have none: AutoGPTQ writes it for all of them."""
    modules = {name.rpartition(".")[0] for name in stored}

    def is_zero_bias(name: str) -> bool:
        module, _, part = name.rpartition(".")
        return part == "bias" and name not in stored and module in modules and not found[name][1][...].float().any()

    return {name: tensor for name, tensor in found.items() if not is_zero_bias(name)}


def _check_tensor(name: str, file: Path, found: Any, stored: Stored) -> None:
    shape = tuple(found.get_shape())
    if shape not in stored.shapes:
        raise CheckpointError(f"{file}: {name} has shape {shape}, but config.json implies {stored.shapes[0]}")
    if found.get_dtype() not in stored.dtypes:
        raise CheckpointError(
            f"{file}: {name} has dtype {found.get_dtype()}; kvllm reads {', '.join(stored.dtypes)}: use a checkpoint "
            "that has it so"
        )


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _read_quantized(name: str, weight: Weight, form: WeightFormat, found: Tensors) -> None:
    """Write this rank's part of a matrix, some rows at a time."""
    module = _module(name)
    tensors = {each: found[each][1][...] for each in stored_tensors(form, module, weight.shape)}
    columns = slice(0, weight.shape[1])
    if weight.dim:
        columns = slice(weight.start, weight.start + weight.target.shape[1])
    if isinstance(weight, ExpertMatrices):
        for expert in range(weight.shape[0]):
            weight.write_expert(expert, read_mxfp4(tensors, module, expert))
    elif weight.order is not None and form.method != "float8":
        every = slice(0, weight.shape[0])
        weight.write_part(0, read_integers(form, tensors, module, every, columns).rows(weight.order))
    else:
        for first, last in weight.strips():
            rows = weight.rows(first, last)
            if form.method == "float8":
                weight.write_part(first, read_float8(form, tensors, module, rows, columns))
            else:
                assert isinstance(rows, slice)
                weight.write_part(first, read_integers(form, tensors, module, rows, columns))
    for tensor in tensors.values():
        forget_pages(tensor)


def _strips(source: Any, weight: Weight) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows of a tensor in a file that this rank holds, some at a time: the first one's index among them, and the
    rows."""
    mapped = source[:]  # reads nothing yet
    for first, last in weight.strips():
        rows = weight.rows(first, last)
        yield first, mapped[rows]
        forget_pages(mapped if isinstance(rows, torch.Tensor) else mapped[: rows.stop])


def _some(names: list[str]) -> str:
    """The first few of many names."""
    rest = len(names) - 5
    return ", ".join(names[:5]) + (f" and {rest} more" if rest > 0 else "")
