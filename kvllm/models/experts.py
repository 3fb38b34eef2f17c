"""Mixture of experts: each token is computed by a few of many MLPs, which a router chooses.

The rows of tokens are sorted by expert, and every expert that is used multiplies its rows in one product: on a CPU with
its part of the packed weight, on a GPU in one launch for all of them. So no token is looked at alone, and a token's
result has the same bits whatever other tokens there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from kvllm.models.config import ModelConfig
from kvllm.models.elementwise import silu_mul
from kvllm.models.layers import Weight, row_part
from kvllm.models.mixture import Experts
from kvllm.models.parts import GatedMLP
from kvllm.models.quantize import TILE
from kvllm.models.weights import LinearWeight, MatrixRows, Packing
from kvllm.parallel import Shard, split


@dataclass(frozen=True)
class SortedRows:
    """Pairs of a token and one of its experts, sorted by expert.

    order: int64 `[T * k]`, pair `token * k + i` of each place. experts: int64 `[T * k]`, ascending.
    num_experts: those of a layer, used or not.
    """

    order: torch.Tensor
    experts: torch.Tensor
    num_experts: int

    @classmethod
    def sort(cls, experts: torch.Tensor, num_experts: int) -> SortedRows:
        """experts: int64 `[T, k]`."""
        found, order = experts.flatten().sort(stable=True)
        return cls(order, found, num_experts)

    @cached_property
    def ends(self) -> torch.Tensor:
        """Where the rows of each expert end: int64 `[num_experts]`, on the device."""
        every = torch.arange(self.num_experts, device=self.experts.device)
        return torch.searchsorted(self.experts, every, right=True)

    @cached_property
    def used(self) -> list[tuple[int, int, int]]:
        """The experts that have rows, with the bounds of these."""
        bounds = pairwise([0, *self.ends.tolist()])
        return [(expert, begin, end) for expert, (begin, end) in enumerate(bounds) if begin < end]


class GroupedLinear:
    """Matrices of one shape, one for each expert, below each other in one weight; each begins with a tile of rows.

    bias: `[experts, out_features]`, or None. adds_bias: false where another rank adds it.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool = False,
        adds_bias: bool = True,
    ) -> None:
        self.adds_bias = adds_bias
        self.num_experts = num_experts
        self.out_features = out_features
        self.stride = -(-out_features // TILE) * TILE
        self.weight = LinearWeight(num_experts * self.stride, in_features, dtype, device)
        self.bias = torch.empty(num_experts, out_features, dtype=dtype, device=device) if bias else None

    def rows(self, expert: int, first: int, count: int) -> MatrixRows:
        """Some rows of one expert's matrix."""
        return MatrixRows(self.weight, expert * self.stride + first, count)

    def forward(self, x: torch.Tensor, rows: SortedRows) -> torch.Tensor:
        """`[rows, in_features]` -> `[rows, out_features]`, each row with the matrix of its expert."""
        bias = self.bias if self.adds_bias else None
        if x.is_cuda:
            from kvllm.kernels.grouped_linear import grouped_linear

            if self.weight.quantized is not None:
                experts = (self.num_experts, self.stride, rows.ends)
                return self.weight.quantized.multiply(x, bias, self.out_features, experts)
            weight = self.weight.tensor.unflatten(0, (self.num_experts, self.stride))[:, : self.out_features]
            return grouped_linear(x, weight, bias, rows.ends)
        out = x.new_empty(len(x), self.out_features)
        for expert, begin, end in rows.used:
            part = self.weight.part(expert * self.stride, self.out_features)
            out[begin:end] = part.multiply(x[begin:end], None if bias is None else bias[expert])
        return out


class ExpertsMLP:
    """`sum(p_i * down_i(silu(gate_i(x)) * up_i(x)))` over the experts of largest probability p; a router says p.

    The ranks share out the columns of every expert.

    NAMES: of the gate, up and down projection in a checkpoint. BIAS: the router and every projection have one.
    """

    name = "mlp"
    BIAS = False
    NAMES = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        assert config.experts is not None
        self.shard = shard
        self.experts = experts = config.experts
        self.inner = split(experts.intermediate_size, shard, "MLP columns of an expert")
        count, hidden, bias = experts.count, config.hidden_size, self.BIAS
        self.router = LinearWeight(count, hidden, dtype, device)
        self.router_bias = torch.empty(count, dtype=dtype, device=device) if bias else None
        self.gate_up = GroupedLinear(count, hidden, 2 * self.inner, dtype, device, bias=bias)
        first = shard.rank == 0
        self.down = GroupedLinear(count, self.inner, hidden, dtype, device, bias=bias, adds_bias=first)

    def weights(self, prefix: str) -> dict[str, Weight]:
        hidden, inner = self.down.out_features, self.experts.intermediate_size
        gate, up, down = self.NAMES
        found = {f"{prefix}.gate.weight": whole_matrix(self.router)}
        for expert in range(self.experts.count):
            name = f"{prefix}.experts.{expert}"
            for i, each in enumerate((gate, up)):
                part = self.gate_up.rows(expert, i * self.inner, self.inner)
                found[f"{name}.{each}.weight"] = row_part(inner, part, self.shard)
            part, start = self.down.rows(expert, 0, hidden), self.shard.rank * self.inner
            found[f"{name}.{down}.weight"] = Weight((hidden, inner), part, 1, start, quantized=True)
        return found

    def allocate(self, packing: Packing) -> None:
        self.router.allocate(packing.unquantized)
        self.gate_up.weight.allocate(packing)
        self.down.weight.allocate(packing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden_size]` -> `[T, hidden_size]`, summed over the ranks."""
        return self.compute(x, *self.route(x))

    def compute(self, x: torch.Tensor, probabilities: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The same, by what `route` has found."""
        rows = SortedRows.sort(experts, self.experts.count)
        gate_up = self.gate_up.forward(x[rows.order // self.experts.per_token], rows)
        return self.shard.all_reduce(
            self._combine(self.down.forward(self.activate(gate_up), rows), rows, probabilities)
        )

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities, float32, and experts, int64, of each token: `[T, k]`."""
        probabilities, experts = self.router.multiply(x).float().softmax(-1).topk(self.experts.per_token)
        if self.experts.normalized:
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities, experts

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[rows, 2 * inner]` -> `[rows, inner]`."""
        return silu_mul(gate_up)

    def _combine(self, out: torch.Tensor, rows: SortedRows, probabilities: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden_size]` -> `[T, hidden_size]`: the sum of each token's rows, in the order of its experts."""
        places = torch.empty_like(rows.order)
        places[rows.order] = torch.arange(len(places), device=places.device)
        total = torch.zeros(len(probabilities), out.shape[1], device=out.device)
        for i, of_tokens in enumerate(places.view_as(probabilities).unbind(1)):
            total.addcmul_(out[of_tokens].float(), probabilities[:, i : i + 1])
        return total.to(out.dtype)


def choose_with_bias(
    scores: torch.Tensor, biased: torch.Tensor, experts: Experts, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of `route`: the experts of the largest `biased`, with their `scores`, both float32 `[T, count]`.

    epsilon: is added to the sum by which scores are divided.
    """
    found = biased.topk(experts.per_token).indices
    chosen = scores.gather(1, found)
    if experts.normalized:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + epsilon)
    return chosen * experts.scale, found


class SharedExpertMLP(ExpertsMLP):
    """A mixture of experts, and one MLP more that computes all tokens.

    SHARED: its name in a checkpoint.
    """

    SHARED = "shared_experts"

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, shard, dtype, device)
        self.shared = GatedMLP(config, shard, dtype, device, inner=self.experts.shared_intermediate_size)

    def weights(self, prefix: str) -> dict[str, Weight]:
        return {**super().weights(prefix), **self.shared.weights(f"{prefix}.{self.SHARED}")}

    def allocate(self, packing: Packing) -> None:
        super().allocate(packing)
        self.shared.allocate(packing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.forward_shared(x)

    def forward_shared(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden_size]` -> `[T, hidden_size]`, summed over the ranks: what that MLP adds."""
        return self.shared.forward(x)


def whole_matrix(weight: LinearWeight) -> Weight:
    """A matrix that every rank holds completely, and that no checkpoint quantizes."""
    shape = (weight.out_features, weight.in_features)
    return Weight(shape, MatrixRows(weight, 0, weight.out_features))
