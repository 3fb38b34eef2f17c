"""The Ray cluster that the workers live in: joined or started here, and places reserved in it."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvllm.errors import ConfigError

CLUSTER_FILE = Path(tempfile.gettempdir(), "ray", "ray_current_cluster")
"""Where Ray notes the address of the last cluster that was started on a machine."""
OBJECT_STORE_BYTES = 80 << 20
"""The object store of a local Ray: nothing is put there, and Ray allows no less."""
CONNECT_SECONDS = 5.0
PLACEMENT_SECONDS = 60.0

_users = 0
"""Executors and replica sets that use a Ray which one of them has joined or started. The last one leaves it."""


def acquire_ray(num_ranks: int) -> None:
    """Join the cluster that this process belongs to, that RAY_ADDRESS names, or that runs here; else start one.

    Raises ConfigError if there is no such cluster.
    """
    global _users
    if not _users and ray.is_initialized():
        return
    if not _users:
        with _keep_sigterm():
            if address := _running_ray():
                _join_ray(address)
            else:
                _start_ray(num_ranks)
    _users += 1


def release_ray() -> None:
    """Leave it, if this was the last one to use what was joined or started here."""
    global _users
    if _users:
        _users -= 1
        if not _users:
            with _keep_sigterm():
                ray.shutdown()


@contextmanager
def _keep_sigterm() -> Iterator[None]:
    """Keep the program's handler of SIGTERM, such as a server's, which lets requests end: Ray puts another in its place
    when it is joined, and none when it is left."""
    handler, library, action = signal.getsignal(signal.SIGTERM), ctypes.CDLL(None), ctypes.create_string_buffer(256)
    library.sigaction(signal.SIGTERM, None, action)
    try:
        yield
    finally:
        if callable(handler):
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)
            else:  # where Python can set none, and Ray has changed none of Python's
                library.sigaction(signal.SIGTERM, action, None)


def _running_ray() -> str | None:
    """The address of a Ray to join."""
    if address := os.environ.get("RAY_ADDRESS"):
        return None if address == "local" else address
    try:
        address = CLUSTER_FILE.read_text().strip()
        _reach(address)
    except (OSError, ValueError):
        return None
    return address


def _reach(address: str) -> None:
    """Raises OSError or ValueError at once where nothing answers. Ray itself would wait for minutes."""
    host, port = address.rsplit(":", 1)
    socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


def _join_ray(address: str) -> None:
    try:
        if ":" in address and "://" not in address:
            _reach(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(
            f"the Ray cluster at {address} cannot be joined ({error}): start it with ray start, or set RAY_ADDRESS to "
            "the address of one that runs, or to local for one that is started here"
        ) from error


def _start_ray(num_ranks: int) -> None:
    # A local Ray serves this process alone: it needs no reports, and no token file in the home directory.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # Ray gives its workers a niceness of 15, with which a rank starves beside any other process.
    os.environ.setdefault("RAY_worker_niceness", "0")

    def init() -> None:
        ray.init(
            address="local",
            num_cpus=max(num_ranks, os.cpu_count() or 1),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )

    if threading.current_thread() is threading.main_thread():
        init()
    else:
        _in_lasting_thread(init)


def _in_lasting_thread(work: Callable[[], object]) -> None:
    """Do what starts processes of Ray: Linux ends them together with the thread that has started them."""
    done = Future[object]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=run, name="kvllm-ray", daemon=True).start()
    done.result()


# Places


class Place:
    """Where a replica runs: a placement group, with a bundle for each of its ranks.

    device: what each bundle has, "cuda" or "cpu".
    strategy: of Ray, by which such a place is asked for again; None for that of the actor which is running, which
        outlives all that is put there.
    """

    def __init__(self, group: PlacementGroup, strategy: str | None = None) -> None:
        self._group = group
        self.strategy = strategy
        self.num_ranks: int = group.bundle_count
        self.device = "cuda" if "GPU" in group.bundle_specs[0] else "cpu"

    @staticmethod
    def ask(num_ranks: int, device: str, strategy: str) -> Place:
        """Ask for one, without waiting for it."""
        bundle: dict[str, float] = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
        return Place(placement_group([bundle] * num_ranks, strategy=strategy), strategy)

    @staticmethod
    def of_this_actor() -> Place:
        group = get_current_placement_group()
        assert group
        return Place(group)

    def again(self) -> Place:
        """Ask for such a place anew, without waiting for it, if this one was given back."""
        return Place.ask(self.num_ranks, self.device, self.strategy) if self.strategy else self

    def give_back(self) -> None:
        if self.strategy and ray.is_initialized():
            remove_placement_group(self._group)

    def nodes(self) -> list[str]:
        """The node of each bundle. Raises ConfigError if the cluster cannot hold the ranks."""
        _wait([self])
        found: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        return [found[bundle] for bundle in range(self.num_ranks)]

    def bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        """What puts an actor of Ray into a bundle."""
        return PlacementGroupSchedulingStrategy(self._group, index)

    def is_ready(self, seconds: float) -> bool:
        """Wait until the ranks have their places, but no longer than `seconds`."""
        return self._group.wait(seconds)


def reserve(num_replicas: int, num_ranks: int, strategy: str, device: str) -> list[Place]:
    """Join a cluster, or start one, and find a place for each replica.

    device: "cuda", "cpu", or "auto" for GPUs if the cluster has any.

    Raises ConfigError if the cluster cannot hold the ranks on such devices. Otherwise, whoever gets the places gives
    them back and calls `release_ray`.
    """
    acquire_ray(num_replicas * num_ranks)
    places = []
    try:
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        found = "cuda" if device == "cuda" or (device == "auto" and has_gpus) else "cpu"
        places += [Place.ask(num_ranks, found, strategy) for _ in range(num_replicas)]
        _wait(places)
    except BaseException:
        for place in places:
            place.give_back()
        release_ray()
        raise
    return places


def _wait(places: list[Place]) -> None:
    if places[0].strategy:
        _check_resources(len(places), places[0].num_ranks, places[0].device, places[0].strategy)
    deadline = time.monotonic() + PLACEMENT_SECONDS
    if not all(place.is_ready(max(0.0, deadline - time.monotonic())) for place in places):
        kind = _kind(places[0].device)
        free = ray.available_resources().get(kind, 0)
        raise ConfigError(
            f"{_sizes(len(places), places[0].num_ranks)}: no place for the ranks in {PLACEMENT_SECONDS:g} s, "
            f"{free:g} {kind}s are free: end what uses the others"
        )


def _check_resources(num_replicas: int, num_ranks: int, device: str, strategy: str) -> None:
    """Refuse bundles that no node can ever hold: they would wait without an end."""
    kind = _kind(device)
    nodes = [int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]]
    on_one_node = strategy == "STRICT_PACK"
    room = sum(node // num_ranks for node in nodes) if on_one_node else sum(nodes) // num_ranks
    if room < num_replicas:
        per_node = ", ".join(map(str, sorted(nodes, reverse=True)))
        raise ConfigError(
            f"{_sizes(num_replicas, num_ranks)} needs as many {kind}s on one node for each replica (with "
            f'placement_strategy="STRICT_PACK") or in the cluster; the nodes have {per_node}'
            + ('. device="cpu" runs ranks on CPUs' if kind == "GPU" else "")
        )


def _kind(device: str) -> str:
    """Ray's name for a device."""
    return "GPU" if device == "cuda" else "CPU"


def _sizes(num_replicas: int, num_ranks: int) -> str:
    ranks = f"tensor_parallel_size={num_ranks}"
    return ranks if num_replicas == 1 else f"data_parallel_size={num_replicas} with {ranks}"
