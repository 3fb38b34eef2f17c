"""The executor of several ranks: a group of Ray actors, built anew when one of them dies or hangs."""

from __future__ import annotations

import time
import weakref
from typing import NoReturn

from msgspec.structs import replace
from ray.util.placement_group import PlacementGroup

from kvllm.core.executor import Executor, WorkersRestarted
from kvllm.core.protocol import StepPlan, StepResult, decode_result, encode
from kvllm.distributed.placement import acquire_ray, release_ray
from kvllm.distributed.restart_budget import RestartBudget
from kvllm.distributed.results import merge
from kvllm.distributed.transfers import TransfersOfRanks
from kvllm.distributed.worker_group import WorkerGroup
from kvllm.errors import WorkerError
from kvllm.worker.build import Loaded, RunnerSettings


class RayExecutor(Executor):
    """Runs plans on `world_size` ranks, in the Ray cluster that this process belongs to, or can join, or starts. Tokens
    of a step in flight go into the next one on the ranks' devices.

    Args:
        placement: a strategy of Ray's placement groups. "STRICT_PACK": all ranks on one node.
        max_restarts: how many faults are repaired before a plan raises WorkerError.
        group: where the ranks go, if their places are reserved already.

    Raises:
        ConfigError: the cluster cannot hold the ranks.
    """

    fills_pending = True

    def __init__(
        self,
        world_size: int,
        placement: str = "STRICT_PACK",
        max_restarts: int = 3,
        group: PlacementGroup | None = None,
        device: str = "auto",
    ) -> None:
        self.world_size = world_size
        self.placement = placement
        self._device_asked = device
        self.restart_seconds: list[float] = []
        """How long each restart took, from the discovery of the fault until all ranks had loaded the model."""
        self._settings: RunnerSettings | None = None
        self._budget = RestartBudget(max_restarts)
        self._transfers = TransfersOfRanks(world_size)
        self._group = group
        self._groups: list[WorkerGroup] = []  # the one group, or none
        acquire_ray(world_size)
        self._finalizer = weakref.finalize(self, _end, self._groups)
        self._groups.append(WorkerGroup(world_size, placement, group, device))

    @property
    def available_memory(self) -> int:
        """Bytes of memory that a rank may call its own: the least over all ranks, before they load the model."""
        return self._groups[0].available_memory

    @property
    def device(self) -> str:
        """The device type of the ranks: "cuda" or "cpu"."""
        return self._groups[0].device

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
            self._transfers = TransfersOfRanks(self.world_size)
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
            self._transfers = TransfersOfRanks(self.world_size)
            self._budget.spend(fault)
            try:
                self._groups.append(WorkerGroup(self.world_size, self.placement, self._group, self._device_asked))
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
