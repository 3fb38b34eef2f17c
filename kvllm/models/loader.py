"""Fills a model with the weights of a checkpoint in safetensors format, or with random ones.

Every tensor's name, dtype and shape is checked from the files' headers before any weight is read. A rank reads its own
part of each tensor, straight into the model's memory; weights are packed one by one afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from kvllm.errors import CheckpointError, ConfigError
from kvllm.models import MODELS
from kvllm.models.config import ModelConfig
from kvllm.models.layers import Weight
from kvllm.models.llama import LlamaModel
from kvllm.parallel import Shard

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
READABLE_DTYPES = ("BF16", "F16", "F32", "F64")


def load_model(
    path: Path, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> LlamaModel:
    """The model of the directory `path`, converted to `dtype`.

    Raises CheckpointError if there are no safetensors files, one cannot be read, or they hold other tensors than
    `config` implies; ConfigError if the ranks cannot share the model out equally.
    """
    files = _find_files(path)
    model = _empty_model(config, shard, dtype, device, max_model_len)
    with ExitStack() as stack:
        _fill(model, [(file, stack.enter_context(_open(file))) for file in files], config)
    model.pack()
    return model


def random_model(
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    seed: int,
    std: float = 0.02,
) -> LlamaModel:
    """A model with normally distributed weights (norms are one), for measurements: the same on any number of ranks."""
    model = _empty_model(config, shard, dtype, device, max_model_len)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.weights().items():
        if name.endswith("norm.weight"):
            weight.target.fill_(1)
            continue
        values = torch.empty(weight.shape, dtype=dtype, device=device).normal_(0, std, generator=generator)
        weight.target.copy_(values.narrow(weight.dim, weight.start, weight.target.shape[weight.dim]))
    model.pack()
    return model


def _empty_model(
    config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> LlamaModel:
    if device.type == "cpu" and dtype == torch.float16:
        raise ConfigError("dtype float16 is not computed on the CPU: use bfloat16 or float32")
    return MODELS[config.architecture](config, shard, dtype, device, max_model_len)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _find_files(path: Path) -> list[Path]:
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    if (path / INDEX_FILE).is_file():
        files = [path / name for name in _indexed_files(path / INDEX_FILE)]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(f"{path}: {INDEX_FILE} names files that are absent, {_some(absent)}: download them")
        return files
    pickled = sorted(file.name for suffix in ("bin", "pt", "pth") for file in path.glob(f"*.{suffix}"))
    if pickled:
        raise CheckpointError(
            f"{path} has its weights in {_some(pickled)} only. kvllm never loads weights from pickle, which can run "
            "any code: convert them to safetensors (load with transformers, then save_pretrained)"
        )
    raise CheckpointError(f"{path} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")


def _indexed_files(file: Path) -> list[str]:
    try:
        return sorted(set(msgspec.json.decode(file.read_bytes(), type=_Index).weight_map.values()))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not an index of safetensors files: {error}") from error


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}): it is damaged or incomplete, download it again"
        ) from error


def _fill(model: LlamaModel, files: list[tuple[Path, Any]], config: ModelConfig) -> None:
    weights = model.weights()
    found = {name: (file, opened.get_slice(name)) for file, opened in files for name in sorted(opened.keys())}
    _check_names(weights, found, config.tie_word_embeddings)
    for name, weight in weights.items():
        _check_tensor(name, *found[name], weight)
    for name, weight in weights.items():
        _read(found[name][1], weight)


def _check_names(weights: dict[str, Weight], found: Iterable[str], tied: bool) -> None:
    def ignored(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")

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


def _read(source: Any, weight: Weight) -> None:
    part = slice(weight.start, weight.start + weight.target.shape[weight.dim])
    weight.target.copy_(source[part] if weight.dim == 0 else source[:, part])


def _some(names: list[str]) -> str:
    """The first few of many names."""
    rest = len(names) - 5
    return ", ".join(names[:5]) + (f" and {rest} more" if rest > 0 else "")
