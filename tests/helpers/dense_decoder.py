"""A decoder over one whole text in float64, every score written out: what paging and compression have to equal.

Its mask says, for each layer and KV head, which tokens a row attends. An entry of a KV cache is computed once, when its
token is, so a run with any history of compressions is one pass over the text with the mask that the history left.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from kvllm.compression.gates import Gates, gates_file
from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax
from kvllm.compression.specs import SPECS, STATISTICS_FILE


@dataclass
class DensePass:
    """logits: `[T, vocab]`; by layer: queries `[Hq, T, d]`, keys and values `[Hkv, T, d]`; rotated, all in float64."""

    logits: Tensor
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]


class DenseDecoder:
    """A checkpoint of the Llama or Qwen3 family."""

    def __init__(self, path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        self.weights = {name: weight.double() for name, weight in load_file(path / "model.safetensors").items()}
        self.num_layers = config["num_hidden_layers"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.eps = config["rms_norm_eps"]
        theta = config["rope_parameters"]["rope_theta"]
        self.statistics = load_file(path / STATISTICS_FILE) if (path / STATISTICS_FILE).is_file() else {}
        files = {name: path / gates_file(name) for name, spec in SPECS.items() if spec.gated}
        self.gates = {name: Gates(**load_file(file)) for name, file in files.items() if file.is_file()}
        self.frequencies = 1 / theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)

    def softmax(self, layer: int) -> Softmax:
        """The softmax of a layer's attention."""
        return PLAIN_SOFTMAX

    def forward(self, token_ids: list[int], visible: Tensor) -> DensePass:
        """`visible`: bool `[layers, Hkv, T, T]`, whether row i attends the token at position j."""
        return self._forward(token_ids, list(range(len(token_ids))), visible, None)

    def recompute(self, text: DensePass, token_ids: list[int], positions: list[int], visible: Tensor) -> DensePass:
        """The pass once more for the rows at `positions`, over the keys and values that `text` has for all positions.

        visible: bool `[layers, Hkv, rows, T]`.
        """
        return self._forward([token_ids[position] for position in positions], positions, visible, text)

    def repeat(self, text: DensePass, token_ids: list[int], positions: list[int], cached: Tensor) -> DensePass:
        """A pass over tokens after `text`, each of which attends what is cached of it, and these tokens up to its own.

        cached: bool `[layers, Hkv, T]`. The result has the keys and values of the new tokens.
        """
        count = len(token_ids)
        earlier = torch.ones(count, count, dtype=torch.bool).tril().expand(*cached.shape[:2], -1, -1)
        visible = torch.cat((cached[:, :, None].expand(-1, -1, count, -1), earlier), dim=-1)
        return self._forward(token_ids, positions, visible, text, appended=True)

    def _forward(
        self,
        token_ids: list[int],
        positions: list[int],
        visible: Tensor,
        cached: DensePass | None,
        appended: bool = False,
    ) -> DensePass:
        """appended: the tokens follow those that are cached. Otherwise they are some of these."""
        result = DensePass(torch.empty(0), [], [], [])
        x = self.weights["model.embed_tokens.weight"][token_ids]
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            normed = self._norm(x, f"{prefix}.input_layernorm")
            queries = self._rotate(self._heads(normed, f"{prefix}.self_attn", "q"), positions)
            if cached is None or appended:
                keys = self._rotate(self._heads(normed, f"{prefix}.self_attn", "k"), positions)
                values = self._heads(normed, f"{prefix}.self_attn", "v")
            else:
                keys, values = cached.keys[layer], cached.values[layer]
            result.queries.append(queries)
            result.keys.append(keys)
            result.values.append(values)
            if cached and appended:
                keys = torch.cat((cached.keys[layer], keys), dim=1)
                values = torch.cat((cached.values[layer], values), dim=1)
            attended = attend(queries, keys, values, visible[layer])
            x = x + attended.transpose(0, 1).flatten(1) @ self.weights[f"{prefix}.self_attn.o_proj.weight"].T
            normed = self._norm(x, f"{prefix}.post_attention_layernorm")
            gate, up = (normed @ self.weights[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ self.weights[f"{prefix}.mlp.down_proj.weight"].T
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        result.logits = self._norm(x, "model.norm") @ head.T
        return result

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[f"{name}.weight"]

    def _heads(self, x: Tensor, prefix: str, name: str) -> Tensor:
        """`[T, hidden]` -> `[heads, T, d]`, normalized where the family does it (Qwen3: queries and keys)."""
        heads = (x @ self.weights[f"{prefix}.{name}_proj.weight"].T).unflatten(1, (-1, self.head_dim)).transpose(0, 1)
        norm = f"{prefix}.{name}_norm"
        return self._norm(heads, norm) if f"{norm}.weight" in self.weights else heads

    def _rotate(self, x: Tensor, positions: list[int]) -> Tensor:
        # Angles are defined in float32: at position 400 their rounding would show against exact ones.
        angles = (torch.tensor(positions).float()[:, None] * self.frequencies).double()
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softmax: Softmax = PLAIN_SOFTMAX) -> Tensor:
    """`[Hq, T, d]` over `[Hkv, S, d]` where `visible` `[Hkv, T, S]` allows it -> `[Hq, T, d]`."""
    return (attention_probabilities(queries, keys, visible, softmax) @ values[:, None]).flatten(0, 1)


def attention_probabilities(queries: Tensor, keys: Tensor, visible: Tensor, softmax: Softmax) -> Tensor:
    """Those of `attend`: `[Hkv, Hq / Hkv, T, S]`."""
    scores = queries.unflatten(0, (len(keys), -1)) @ keys[:, None].mT * softmax.scale_of(keys.shape[-1])
    if softmax.soft_cap is not None:
        scores = softmax.soft_cap * torch.tanh(scores / softmax.soft_cap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if softmax.sinks is None:
        return scores.softmax(-1)
    sinks = softmax.sinks.to(scores).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
