"""What the ranks have found in a step, as one result."""

from __future__ import annotations

from kvllm.core.protocol import MissingMass, StepResult
from kvllm.distributed.transfers import TransfersOfRanks


def merge(results: list[StepResult], transfers: TransfersOfRanks) -> StepResult:
    """The result of rank 0, which samples, with what all ranks have done for their own heads: transfers, and recall.

    A bound is that of the head where most may be missing.
    """
    first = results[0]
    first.transfers = transfers.add([result.transfers for result in results])
    bounds: dict[int, float] = {}
    for mass in (mass for result in results for mass in result.missing_masses):
        bounds[mass.seq_id] = max(mass.bound, bounds.get(mass.seq_id, 0.0))
    first.missing_masses = [MissingMass(seq_id, bound) for seq_id, bound in bounds.items()]
    first.recalled_bytes = sum(result.recalled_bytes for result in results)
    return first
