"""The sizes of a mixture of experts, read from `config.json`. Free of torch."""

from __future__ import annotations

import math

import msgspec

from kvllm.errors import CheckpointError

MOST_EXPERTS = 1 << 12
"""Far more than any published model has."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of each layer that has some.

    count: experts of a layer. per_token: those that compute one token. intermediate_size: of one expert.
    normalized: the probabilities of a token's experts are divided by their sum.
    dense_layers: indices of the layers that have an MLP instead.
    scale: probabilities are multiplied by it. shared_intermediate_size: of an MLP beside the experts for all tokens; 0:
        there is none.
    groups, best_groups: experts in equal groups, and how many of these a token chooses from.
    alpha, limit: of the bounded SwiGLU of gpt-oss. Families look at no more of these than they have.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool = True
    dense_layers: tuple[int, ...] = ()
    scale: float = 1.0
    shared_intermediate_size: int = 0
    groups: int = 1
    best_groups: int = 1
    alpha: float = 1.0
    limit: float = math.inf

    def expected_used(self, tokens: int) -> float:
        """Experts of a layer that so many tokens need together, in expectation, if all are chosen equally often."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


def make_experts(
    num_experts: int,
    num_experts_per_tok: int,
    intermediate_size: int,
    normalized: bool = True,
    dense_layers: tuple[int, ...] = (),
    shared_intermediate_size: int = 0,
) -> Experts:
    """The arguments in one. Raises CheckpointError for numbers that cannot be."""
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise CheckpointError(f"num_experts is {num_experts}, but must be at least 1 and at most {MOST_EXPERTS}")
    if not 1 <= num_experts_per_tok <= num_experts:
        raise CheckpointError(
            f"num_experts_per_tok is {num_experts_per_tok}, but must be at least 1 and at most {num_experts}"
        )
    for size in (intermediate_size, shared_intermediate_size or 1):
        if not 1 <= size <= 1 << 20:
            raise CheckpointError(f"an expert's intermediate size is {size}, but must be 1 to {1 << 20}")
    return Experts(
        count=num_experts,
        per_token=num_experts_per_tok,
        intermediate_size=intermediate_size,
        normalized=normalized,
        dense_layers=dense_layers,
        shared_intermediate_size=shared_intermediate_size,
    )
