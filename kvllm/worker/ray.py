"""The executor of several ranks: a pool of Ray actors, built anew when one of them dies or hangs."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
import weakref
from pathlib import Path
from typing import NoReturn

import ray

from kvllm.core.protocol import StepPlan, StepResult, decode_result, encode
from kvllm.parallel import WorkerError
from kvllm.worker.executor import Executor, WorkersRestarted
from kvllm.worker.pool import Pool
from kvllm.worker.rank import RunnerSettings

logger = logging.getLogger(__name__)

CLUSTER_FILE = Path(tempfile.gettempdir(), "ray", "ray_current_cluster")
"""Where Ray notes the address of the last cluster that was started on a machine."""
STEPS_FOR_NEW_BUDGET = 1000
"""So many steps without a fault, and as many restarts as in the beginning are allowed again."""
OBJECT_STORE_BYTES = 80 << 20
"""Of a local Ray: nothing is put there, and Ray allows no less."""


class RayExecutor(Executor):
    """Runs plans on `world_size` ranks, in the Ray cluster that this process belongs to, or can join, or starts.

    Args:
        placement: a strategy of Ray's placement groups. "STRICT_PACK": all ranks on one node.
        max_restarts: how many faults are repaired before `execute` raises WorkerError.

    Raises:
        ConfigError: the cluster cannot hold the ranks.
    """

    def __init__(self, world_size: int, placement: str = "STRICT_PACK", max_restarts: int = 3) -> None:
        self.world_size = world_size
        self.placement = placement
        self.max_restarts = max_restarts
        self.restart_seconds: list[float] = []
        """How long each restart took, from the discovery of the fault until all ranks had loaded the model."""
        self._settings: RunnerSettings | None = None
        self._failure: WorkerError | None = None
        self._restarts = self._good_steps = 0
        self._pools: list[Pool] = []  # the one pool, or none
        _acquire_ray(world_size)
        self._finalizer = weakref.finalize(self, _end, self._pools)
        self._pools.append(Pool(world_size, placement))

    @property
    def available_memory(self) -> int:
        """Bytes of memory that a rank may call its own: the least over all ranks, before they load the model."""
        return self._pools[0].available_memory

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, on their nodes."""
        return self._pools[0].pids

    def load(self, settings: RunnerSettings) -> None:
        """Let every rank load its shard. Raises ConfigError and CheckpointError as `make_runner` does."""
        self._settings = settings
        self._pools[0].load(settings)

    def execute(self, plan: StepPlan) -> StepResult:
        """Raises WorkersRestarted when a fault was repaired, WorkerError when there were too many."""
        if self._failure:
            raise self._failure
        if not self._pools or not self._pools[0].in_step:
            self._restart(WorkerError("a step was interrupted before every rank had its plan"))
        try:
            result = decode_result(self._pools[0].execute(encode(plan)))
        except WorkerError as fault:
            self._restart(fault)
        self._good_steps += 1
        if self._good_steps >= STEPS_FOR_NEW_BUDGET:
            self._restarts = 0
        return result

    def close(self) -> None:
        self._finalizer()

    def _restart(self, fault: WorkerError) -> NoReturn:
        begin = time.monotonic()
        self._good_steps = 0
        while True:
            _close(self._pools)
            if self._restarts == self.max_restarts:
                self._failure = WorkerError(f"the workers failed again after {self._restarts} restarts: {fault}")
                raise self._failure from fault
            self._restarts += 1
            logger.warning("restart %d of at most %d: %s", self._restarts, self.max_restarts, fault)
            try:
                self._pools.append(Pool(self.world_size, self.placement))
                if self._settings:
                    self._pools[0].load(self._settings)
            except WorkerError as another:
                fault = another
            else:
                self.restart_seconds.append(time.monotonic() - begin)
                raise WorkersRestarted from fault


def _close(pools: list[Pool]) -> None:
    for pool in pools:
        pool.close()
    pools.clear()


def _end(pools: list[Pool]) -> None:
    _close(pools)
    _release_ray()


_users_of_local_ray = 0
"""Executors that use a Ray which one of them started: the last one ends it."""


def _acquire_ray(world_size: int) -> None:
    global _users_of_local_ray
    if _users_of_local_ray:
        _users_of_local_ray += 1
    elif not ray.is_initialized():
        if address := _running_ray():
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        else:
            _start_ray(world_size)
            _users_of_local_ray = 1


def _running_ray() -> str | None:
    """The address of a Ray to join. With address="auto", Ray itself would wait a minute for one that has died."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    try:
        address = CLUSTER_FILE.read_text().strip()
        host, port = address.rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=2).close()
    except (OSError, ValueError):
        return None
    return address


def _start_ray(world_size: int) -> None:
    # Nobody else reaches a local Ray: no reports, and no token file in the home directory.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(
        address="local",
        num_cpus=max(world_size, os.cpu_count() or 1),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )


def _release_ray() -> None:
    global _users_of_local_ray
    if _users_of_local_ray:
        _users_of_local_ray -= 1
        if not _users_of_local_ray:
            ray.shutdown()
