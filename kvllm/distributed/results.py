"""What the ranks have found in a step, as one result."""

from __future__ import annotations

from itertools import chain

from msgspec.structs import replace

from kvllm.core.protocol import MissingMass, StepResult
from kvllm.distributed.transfers import TransfersOfRanks


def merge(results: list[StepResult], transfers: TransfersOfRanks) -> StepResult:
    """The result of rank 0, which samples, with what all ranks have done for their own heads: transfers, recall, and
    what is left of KV pairs.

    A bound is that of the head where most may be missing.
    """
    first = results[0]
    first.transfers = transfers.add([result.transfers for result in results])
    bounds: dict[int, float] = {}
    for mass in (mass for result in results for mass in result.missing_masses):
        bounds[mass.seq_id] = max(mass.bound, bounds.get(mass.seq_id, 0.0))
    first.missing_masses = [MissingMass(seq_id, bound) for seq_id, bound in bounds.items()]
    first.recalled_bytes = sum(result.recalled_bytes for result in results)
    for i, kept in enumerate(first.kept_pairs):
        of_layers = zip(*(result.kept_pairs[i].bits for result in results), strict=True)
        first.kept_pairs[i] = replace(kept, bits=[[*chain.from_iterable(heads)] for heads in of_layers])
    return first
