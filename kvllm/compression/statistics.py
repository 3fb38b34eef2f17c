"""Statistics of a model's queries before rotary embedding, from a file beside the checkpoint.

`kvllm calibrate` writes the file. A rank reads the query heads of its KV heads, and
replicas of a KV head read all query heads of that one: so all of them keep the same KV pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvllm.compression.specs import STATISTICS_FILE
from kvllm.errors import CheckpointError
from kvllm.models.config import ModelConfig
from kvllm.parallel import KVHeads


@dataclass(frozen=True)
class QueryStatistics:
    """Statistics by layer and query head, float32.

    mean: `[layers, Hq, d]`. magnitude: `[layers, Hq, d / 2]`, the mean length of each pair of channels that turns
    together. covariance: `[layers, Hq, d, d]`.
    """

    mean: Tensor
    magnitude: Tensor
    covariance: Tensor

    def of_layers(self, layers: Sequence[int]) -> QueryStatistics:
        if len(layers) == len(self.mean):
            return self  # without a copy
        some = list(layers)
        return QueryStatistics(self.mean[some], self.magnitude[some], self.covariance[some])


def write_statistics(folder: Path, statistics: QueryStatistics, metadata: dict[str, str]) -> Path:
    """Write the file of all heads to the checkpoint's folder. Returns its path."""
    path = folder / STATISTICS_FILE
    names = ("mean", "magnitude", "covariance")
    save_file({name: getattr(statistics, name).float().contiguous().cpu() for name in names}, path, metadata)
    return path


def read_statistics(folder: Path, model: ModelConfig, heads: KVHeads, device: torch.device) -> QueryStatistics:
    """The statistics of the query heads that belong to the KV heads of a rank.

    Raises CheckpointError if the checkpoint's folder has no such file, or one that is not of this model.
    """
    path = folder / STATISTICS_FILE
    command = f"`kvllm calibrate {folder}`"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {STATISTICS_FILE}, which the compression method needs: write it with {command}"
        )
    num_heads, width = model.num_query_heads, model.head_dim
    shapes = {
        "mean": (model.num_layers, num_heads, width),
        "magnitude": (model.num_layers, num_heads, width // 2),
        "covariance": (model.num_layers, num_heads, width, width),
    }
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): write it again with {command}") from error
    if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()} != {
        name: (shape, torch.float32) for name, shape in shapes.items()
    }:
        raise CheckpointError(f"{path} is not of this model: write it again with {command}")
    group = num_heads // model.num_kv_heads
    of_rank = slice(heads.first * group, (heads.first + heads.count) * group)
    return QueryStatistics(**{name: tensor[:, of_rank].to(device) for name, tensor in found.items()})
