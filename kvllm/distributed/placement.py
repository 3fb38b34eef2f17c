"""The Ray cluster that the workers live in: joined or started here, and places reserved in it."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from kvllm.errors import ConfigError

CLUSTER_FILE = Path(tempfile.gettempdir(), "ray", "ray_current_cluster")
"""Where Ray notes the address of the last cluster that was started on a machine."""
OBJECT_STORE_BYTES = 80 << 20
"""The object store of a local Ray: nothing is put there, and Ray allows no less."""
PLACEMENT_SECONDS = 60.0

_users = 0
"""Executors and replica sets that use a Ray which one of them has joined or started. The last one leaves it."""


def acquire_ray(num_ranks: int) -> None:
    """Join the cluster that this process belongs to, that RAY_ADDRESS names, or that runs here; else start one."""
    global _users
    if not _users and ray.is_initialized():
        return
    if not _users:
        if address := _running_ray():
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        else:
            _start_ray(num_ranks)
    _users += 1


def release_ray() -> None:
    """Leave it, if this was the last one to use what was joined or started here."""
    global _users
    if _users:
        _users -= 1
        if not _users:
            ray.shutdown()


def _running_ray() -> str | None:
    """The address of a Ray to join. With address="auto", Ray itself would wait a minute for one that has died."""
    if address := os.environ.get("RAY_ADDRESS"):
        return None if address == "local" else address
    try:
        address = CLUSTER_FILE.read_text().strip()
        host, port = address.rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=2).close()
    except (OSError, ValueError):
        return None
    return address


def _start_ray(num_ranks: int) -> None:
    # A local Ray serves this process alone: it needs no reports, and no token file in the home directory.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # Ray gives its workers a niceness of 15, with which a rank starves beside any other process.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        num_cpus=max(num_ranks, os.cpu_count() or 1),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )


# Places


def reserve(num_replicas: int, num_ranks: int, strategy: str, device: str) -> list[PlacementGroup]:
    """A placement group for each replica, with a bundle for each of its ranks.

    device: "cuda", "cpu", or "auto" for GPUs if the cluster has any.
    Raises ConfigError if the cluster cannot hold the ranks on such devices.
    """
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    kind = "GPU" if device == "cuda" or (device == "auto" and has_gpus) else "CPU"
    _check_resources(num_replicas, num_ranks, kind, strategy)
    groups = [ask_for(num_ranks, kind, strategy) for _ in range(num_replicas)]
    try:
        _wait(groups, f"{_sizes(num_replicas, num_ranks)}: no place for the ranks", kind)
    except BaseException:
        for group in groups:
            remove_placement_group(group)
        raise
    return groups


def _wait(groups: list[PlacementGroup], what: str, kind: str) -> None:
    deadline = time.monotonic() + PLACEMENT_SECONDS
    if not all(group.wait(max(0.0, deadline - time.monotonic())) for group in groups):
        free = ray.available_resources().get(kind, 0)
        raise ConfigError(f"{what} in {PLACEMENT_SECONDS:g} s, {free:g} {kind}s are free: end what uses the others")


def ask_for(num_ranks: int, kind: str, strategy: str) -> PlacementGroup:
    """The same for one replica, without waiting for it."""
    bundle: dict[str, float] = {"CPU": 1, "GPU": 1} if kind == "GPU" else {"CPU": 1}
    return placement_group([bundle] * num_ranks, strategy=strategy)


def kind_of(group: PlacementGroup) -> str:
    return "GPU" if "GPU" in group.bundle_specs[0] else "CPU"


def nodes_of(group: PlacementGroup) -> list[str]:
    """The node of each bundle. The group must be placed."""
    found: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [found[bundle] for bundle in range(group.bundle_count)]


def _check_resources(num_replicas: int, num_ranks: int, kind: str, strategy: str) -> None:
    """Refuse bundles that no node can ever hold: they would wait without an end."""
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


def _sizes(num_replicas: int, num_ranks: int) -> str:
    ranks = f"tensor_parallel_size={num_ranks}"
    return ranks if num_replicas == 1 else f"data_parallel_size={num_replicas} with {ranks}"
