"""Transfers between pool and host that every rank makes for its own heads."""

from __future__ import annotations

from collections import Counter

from kvllm.core.protocol import TransferReport


class TransfersOfRanks:
    """The reports of all ranks, as one: a load has ended when it has on every rank, and is lost if one lost it."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._reports: Counter[int] = Counter()  # of loads that not all ranks have reported
        self._lost = set[int]()

    def add(self, reports: list[TransferReport]) -> TransferReport:
        """The reports of a step, one of each rank. Blocks and their time are those of the slowest."""
        for report in reports:
            self._reports.update((*report.loaded, *report.lost))
            self._lost.update(report.lost)
        ended = [number for number, count in self._reports.items() if count == self._world_size]
        for number in ended:
            del self._reports[number]
        lost = [number for number in ended if number in self._lost]
        self._lost.difference_update(lost)
        slowest = max(reports, key=lambda report: report.seconds)
        loaded = [number for number in ended if number not in lost]
        on_disk = set(reports[0].on_disk).intersection(*(report.on_disk for report in reports[1:]))
        return TransferReport(loaded, lost, slowest.num_blocks, slowest.seconds, list(on_disk))
