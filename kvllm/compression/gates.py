"""Trained gates: a small network of each KV head that judges a KV pair by what the cache has of it, from a file beside
the checkpoint.

`kvllm calibrate --gates` trains the gates of a method and writes the file. A gate reads the key in
front of its rotation and the value, so nothing is stored beside KV pairs, and no pass of the model is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from kvllm.compression.precision import no_tf32
from kvllm.compression.rotation import unrotate
from kvllm.errors import CheckpointError
from kvllm.models.config import ModelConfig
from kvllm.parallel import KVHeads


@dataclass(frozen=True)
class Gates:
    """Networks with one hidden layer of U units by layer and KV head, float32: `output silu(hidden x + hidden_bias) +
    output_bias`, where x is the key in front of its rotation with the value after it.

    hidden: `[layers, Hkv, U, 2 d]`. hidden_bias, output: `[layers, Hkv, U]`. output_bias: `[layers, Hkv]`.
    """

    hidden: Tensor
    hidden_bias: Tensor
    output: Tensor
    output_bias: Tensor

    def of_layers(self, layers: Sequence[int]) -> Gates:
        if len(layers) == len(self.hidden):
            return self  # without a copy
        some = list(layers)
        return Gates(*(getattr(self, field.name)[some] for field in fields(self)))

    def logits(self, inputs: Tensor) -> Tensor:
        """`[layers, Hkv, n]` from `gate_inputs` `[layers, Hkv, n, 2 d]`."""
        num_layers, num_heads = inputs.shape[:2]
        hidden, hidden_bias, output = (x.flatten(0, 1) for x in (self.hidden, self.hidden_bias, self.output))
        units = silu(torch.baddbmm(hidden_bias[:, None], inputs.flatten(0, 1), hidden.mT))
        found = torch.bmm(units, output[..., None])[..., 0]
        return found.unflatten(0, (num_layers, num_heads)) + self.output_bias[..., None]


def gate_inputs(keys: Tensor, values: Tensor, last_position: int, frequencies: Tensor) -> Tensor:
    """float32 `[..., n, 2 d]` from the rotated keys and the values of successive positions, `[..., n, d]` each.

    last_position: that of the last of the n.
    """
    return torch.cat((unrotate(keys, last_position, frequencies), values.float()), dim=-1)


@torch.no_grad()
@no_tf32()
def gate_logits(
    gates: Gates, keys: Tensor, values: Tensor, last_positions: Sequence[int], frequencies: Tensor
) -> Tensor:
    """What the gates say of the KV pairs of sequences in one layer after the other.

    Args:
        gates: of the layers, for these KV heads.
        keys, values: `[layers * S, Hkv, n, d]`; keys rotated.
        last_positions: for each row the position of its last key.
        frequencies: float32 `[d / 2]`, of the rotary embedding.

    Returns:
        float32 `[layers * S, Hkv, n]`, bit-identical for a sequence whatever the others are.
    """
    keys, values = (x.unflatten(0, (len(gates.hidden), -1)) for x in (keys, values))
    of_sequences = [
        gates.logits(gate_inputs(keys[:, i], values[:, i], last_positions[i], frequencies))
        for i in range(keys.shape[1])  # whose products must not depend on the others
    ]
    return torch.stack(of_sequences, dim=1).flatten(0, 1)


def gates_file(method: str) -> str:
    """The name of the file of a method's gates, in the checkpoint's folder."""
    return f"kv_gates_{method}.safetensors"


def write_gates(folder: Path, method: str, gates: Gates, metadata: dict[str, str]) -> Path:
    """Write the file of all heads to the checkpoint's folder. Returns its path."""
    path = folder / gates_file(method)
    tensors = {field.name: getattr(gates, field.name) for field in fields(Gates)}
    save_file({name: tensor.detach().float().contiguous().cpu() for name, tensor in tensors.items()}, path, metadata)
    return path


def read_gates(folder: Path, method: str, model: ModelConfig, heads: KVHeads, device: torch.device) -> Gates:
    """The gates of a method for the KV heads of a rank.

    Raises CheckpointError if the checkpoint's folder has no such file, or one that is damaged or not of this model.
    """
    path = folder / gates_file(method)
    command = f"`kvllm calibrate {folder} --gates {method}`"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {path.name}, which method={method!r} needs: train it with {command}")
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): train it again with {command}") from error
    of_heads = (model.num_layers, model.num_kv_heads)
    units = found["output"].shape[-1:] if "output" in found else (0,)
    shapes = {
        "hidden": (*of_heads, *units, 2 * model.head_dim),
        "hidden_bias": (*of_heads, *units),
        "output": (*of_heads, *units),
        "output_bias": of_heads,
    }
    if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()} != {
        name: (shape, torch.float32) for name, shape in shapes.items()
    }:
        raise CheckpointError(f"{path} is not of this model: train it again with {command}")
    of_rank = slice(heads.first, heads.first + heads.count)
    return Gates(**{name: tensor[:, of_rank].to(device) for name, tensor in found.items()})
