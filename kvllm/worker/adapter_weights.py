"""The matrices of a model that adapters change, and a rank's part of an adapter for them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch

from kvllm.errors import RequestError
from kvllm.lora.files import Shapes, content_digest, open_weights, read_pairs
from kvllm.lora.product import LowRank, even
from kvllm.lora.request import Adapter
from kvllm.models import model_family
from kvllm.models.config import ModelConfig
from kvllm.models.layers import Weight
from kvllm.models.weights import LinearWeight, MatrixRows
from kvllm.parallel import SingleRank

ADAPTABLE = re.compile(
    r"(model\.layers\.\d+\.(?:self_attn\.(?:q|k|v|o|qkv)|mlp\.(?:gate|up|down|gate_up))_proj)\.weight"
)
"""Names of the tensors in a checkpoint."""


def adaptable_weights(weights: dict[str, Weight]) -> dict[str, Weight]:
    """Of a model's weights those that adapters may change, by their modules' names."""
    found = {}
    for name, weight in weights.items():
        match = ADAPTABLE.fullmatch(name)
        if match and isinstance(weight.target, MatrixRows) and len(weight.shape) == 2:
            found[match[1]] = weight
    return found


def adaptable_shapes(config: ModelConfig) -> Shapes:
    """The shapes of these in a model, which takes no memory."""
    build = model_family(config.architecture).build
    model = build(config, SingleRank(), torch.float32, torch.device("meta"), 1)
    return {name: (each.shape[0], each.shape[1]) for name, each in adaptable_weights(model.weights()).items()}


def adapted_matrices(weights: dict[str, Weight], rank: int) -> dict[LinearWeight, int]:
    """The matrices of these, each with the rank of an adapter that changes all its projections with that rank."""
    ranks = Counter[LinearWeight]()
    for weight in weights.values():
        assert isinstance(weight.target, MatrixRows)
        ranks[weight.target.matrix] += rank
    return {matrix: even(total) for matrix, total in ranks.items()}


def adapter_bytes(weights: dict[str, Weight], rank: int, dtype: torch.dtype) -> int:
    """Bytes of an adapter that changes all of these, each with matrices of that rank."""
    ranks = adapted_matrices(weights, rank).items()
    return sum(total * (matrix.in_features + matrix.out_features) for matrix, total in ranks) * dtype.itemsize


def read_adapter(adapter: Adapter, weights: dict[str, Weight], dtype: torch.dtype) -> dict[LinearWeight, LowRank]:
    """A rank's part of an adapter, for each of its matrices that the adapter changes.

    weights: of the rank's model that adapters may change. Raises RequestError if the files are not what was checked.
    """
    path = Path(adapter.path)
    if content_digest(path) != adapter.digest:
        raise RequestError(f"the files of {path} were written again after they were checked: load the adapter again")
    parts: dict[LinearWeight, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
    pairs = read_pairs(path)
    with open_weights(path) as file:
        for module, pair in pairs.items():
            weight = weights[module]
            assert isinstance(weight.target, MatrixRows)
            matrix, count = weight.target.matrix, weight.target.count
            down = file.get_tensor(pair.a).float().narrow(1, weight.first_column, matrix.in_features)
            up = file.get_tensor(pair.b).float()[weight.rows(0, count)] * pair.scale
            parts.setdefault(matrix, []).append((weight.target.first, down, up))
    return {matrix: LowRank.of(matrix.out_features, of_matrix, dtype) for matrix, of_matrix in parts.items()}
