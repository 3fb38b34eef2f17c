"""What the ranks have found in a step, as one result."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from msgspec.structs import replace

from kvllm.core.protocol import MissingMass, StepResult, TransferReport


class TransfersOfRanks:
    """The reports of all ranks, as one: a load has ended when it has on every rank, and is lost if one lost it."""

    def __init__(self) -> None:
        self._reports: Counter[int] = Counter()  # of loads that not all ranks have reported
        self._lost = set[int]()

    def add(self, reports: list[TransferReport]) -> TransferReport:
        """The reports of a step, one of each rank. Blocks and their time are those of the slowest."""
        for report in reports:
            self._reports.update((*report.loaded, *report.lost))
            self._lost.update(report.lost)
        ended = [number for number, count in self._reports.items() if count == len(reports)]
        for number in ended:
            del self._reports[number]
        lost = [number for number in ended if number in self._lost]
        self._lost.difference_update(lost)
        slowest = max(reports, key=lambda report: report.seconds)
        loaded = [number for number in ended if number not in lost]
        on_disk = set(reports[0].on_disk).intersection(*(report.on_disk for report in reports[1:]))
        return TransferReport(loaded, lost, slowest.num_blocks, slowest.seconds, list(on_disk))


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
