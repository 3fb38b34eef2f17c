"""What follows the hidden states: pooling, dense layers or scores of classes, and their activation. In float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from kvllm.errors import CheckpointError
from kvllm.files.checkpoint import open_checkpoint
from kvllm.files.tensor import CheckpointTensor
from kvllm.models.config import ModelConfig
from kvllm.models.loader import EMBEDDING, HEAD, SCORE, of_whole_model
from kvllm.pooling_config import Activation, Dense, PoolingConfig, ScoreRows
from kvllm.tokenizer import Tokenizer

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Normalize": lambda x: F.normalize(x, dim=-1),
    "Sigmoid": torch.sigmoid,
    "Softmax": lambda x: x.softmax(-1),
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": F.gelu,
}


class PoolingHead:
    """layers: weight `[out, in]`, bias and activation of each."""

    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor | None, Activation]], hidden_size: int) -> None:
        self._layers = layers
        self.size = len(layers[-1][0]) if layers else hidden_size
        """Numbers of a vector that comes out."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Pooled states, or those of tokens, float32 `[R, hidden_size]` -> `[R, size]`."""
        for weight, bias, activation in self._layers:
            hidden = ACTIVATIONS[activation](F.linear(hidden, weight, bias))
        return hidden


def load_head(
    path: Path, config: PoolingConfig, model: ModelConfig, tokenizer: Tokenizer | None, device: torch.device
) -> PoolingHead:
    """Read the matrices after the last hidden state. Raises CheckpointError."""
    size, layers = model.hidden_size, []
    for dense in config.dense:
        weight, bias = _read_dense(dense, size)
        layers.append((weight.to(device), None if bias is None else bias.to(device), dense.activation))
        size = dense.out_features
    if config.task == "classify":
        layers.append((_read_scores(path, config, model, tokenizer).to(device), None, "Identity"))
    return PoolingHead(layers, model.hidden_size)


def _read_dense(dense: Dense, in_features: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(dense.file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{dense.file} cannot be read ({error}): download it again") from error
    weight, bias = found.get("linear.weight"), found.get("linear.bias")
    expected = dense.out_features, in_features
    if weight is None or tuple(weight.shape) != expected or dense.in_features != in_features:
        given = "none" if weight is None else tuple(weight.shape)
        raise CheckpointError(f"{dense.file}: linear.weight has shape {given}, but {expected} is expected")
    return weight.float(), None if bias is None else bias.float()


def _read_scores(path: Path, config: PoolingConfig, model: ModelConfig, tokenizer: Tokenizer | None) -> torch.Tensor:
    """float32 `[labels, hidden_size]`."""
    with open_checkpoint(path).open_tensors() as opened:
        found = of_whole_model(opened)
        if config.score_rows is None:
            return _matrix(found.get(SCORE), SCORE, (len(config.labels), model.hidden_size)).read().float()
        if model.logit_cap is not None:
            raise CheckpointError(
                f"final_logit_softcapping is {model.logit_cap}: scores by the logits of tokens do not know this bound, "
                "use another reranker"
            )
        name = HEAD if HEAD in found else EMBEDDING
        matrix = _matrix(found.get(name), name, (model.vocab_size, model.hidden_size))
        rows = matrix.read(torch.tensor(_token_ids(config.score_rows, model, tokenizer))).float() / model.logit_divisor
        return rows[1:] - rows[:1] if config.score_rows.difference else rows


def _matrix(found: CheckpointTensor | None, name: str, shape: tuple[int, int]) -> CheckpointTensor:
    if found is None:
        raise CheckpointError(
            f"the checkpoint has no {name}, which scores classes: use a classifier, or name the tokens whose logits "
            'are the scores, as hf_overrides={"classifier_from_token": ["no", "yes"]} (docs/vllm.md)'
        )
    if found.shape != shape:
        raise CheckpointError(f"{found.file}: {name} has shape {found.shape}, but {shape} is expected")
    return found


def _token_ids(rows: ScoreRows, model: ModelConfig, tokenizer: Tokenizer | None) -> list[int]:
    found = []
    for token in rows.tokens:
        token_id = token
        if isinstance(token, str):
            if tokenizer is None:
                raise CheckpointError(f"classifier_from_token has {token!r}, and the checkpoint has no tokenizer")
            token_id = tokenizer.token_id(token)
        if not isinstance(token_id, int) or not 0 <= token_id < model.vocab_size:
            raise CheckpointError(f"classifier_from_token has {token!r}, which is no token of the vocabulary")
        found.append(token_id)
    return found
