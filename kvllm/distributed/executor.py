"""The executor of several ranks: a group of Ray actors, built anew when one of them dies or hangs."""

from __future__ import annotations

import time
import weakref
from typing import NoReturn

from msgspec.structs import replace

from kvllm.core.executor import Executor, WorkersRestarted
from kvllm.core.protocol import StepPlan, StepResult, decode_result, encode
from kvllm.distributed.faults import RestartBudget
from kvllm.distributed.placement import Place, release_ray
from kvllm.distributed.results import TransfersOfRanks, merge
from kvllm.distributed.worker_group import WorkerGroup
from kvllm.errors import WorkerError
from kvllm.worker.build import Loaded, RunnerSettings


class RayExecutor(Executor):
    """Runs plans on the ranks of a place, which it gives back. Tokens of a step in flight go into the next one on the
    ranks' devices.

    budget: how many faults are repaired before a plan raises WorkerError.
    """

    fills_pending = True

    def __init__(self, place: Place, budget: RestartBudget) -> None:
        self.device = place.device
        self.restart_seconds: list[float] = []
        """How long each restart took, from the discovery of the fault until all ranks had loaded the model."""
        self._settings: RunnerSettings | None = None
        self._budget = budget
        self._transfers = TransfersOfRanks()
        self._groups: list[WorkerGroup] = []  # the one group, or none
        self._finalizer = weakref.finalize(self, _end, self._groups)
        self._place = place
        self._groups.append(WorkerGroup(place))

    @property
    def available_memory(self) -> int:
        """Bytes of memory that a rank may call its own: the least over all ranks, before they load the model."""
        return self._groups[0].available_memory

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, on their nodes."""
        return self._groups[0].pids

    def load(self, settings: RunnerSettings) -> Loaded:
        """Let every rank load its shard. Raises ConfigError and CheckpointError as `make_runner` does.

        The KV pool will have as many blocks after a restart.
        """
        loaded = self._groups[0].load(settings)
        engine = replace(settings.engine, num_blocks=loaded.num_blocks)
        self._settings = replace(settings, engine=engine, gpu_memory_utilization=None)
        return loaded

    def launch(self, plan: StepPlan) -> None:
        """Raises WorkersRestarted when a fault was repaired, WorkerError when there were too many."""
        self._budget.check()
        if plan.reset:  # loads are numbered anew
            self._transfers = TransfersOfRanks()
        if not self._groups or not self._groups[0].in_step:
            self._restart(WorkerError("a step was interrupted before every rank had its plan"))
        try:
            self._groups[0].launch(encode(plan), reset=plan.reset)
        except WorkerError as fault:
            self._restart(fault)

    def collect(self) -> StepResult:
        """Raises what `launch` raises."""
        try:
            results = self._groups[0].collect()
        except WorkerError as fault:
            self._restart(fault)
        self._budget.count(1)
        return merge([decode_result(result) for result in results], self._transfers)

    def close(self) -> None:
        self._finalizer()

    def _restart(self, fault: WorkerError) -> NoReturn:
        begin = time.monotonic()
        while True:
            _close(self._groups)
            self._transfers = TransfersOfRanks()
            self._budget.spend(fault)
            try:
                self._place = self._place.again()
                self._groups.append(WorkerGroup(self._place))
                if self._settings:
                    self._groups[0].load(self._settings)
            except WorkerError as another:
                fault = another
            else:
                self.restart_seconds.append(time.monotonic() - begin)
                raise WorkersRestarted from fault


def _close(groups: list[WorkerGroup]) -> None:
    for group in groups:
        group.close()
    groups.clear()


def _end(groups: list[WorkerGroup]) -> None:
    _close(groups)
    release_ray()
