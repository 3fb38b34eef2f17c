"""Fixtures that several test files share: data that is no part of the project, and a Ray cluster."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # threads of several processes on the same cores wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.helpers.gpu_order import PARTS, place


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes that share the tests: one more than cores, because some wait for servers and for workers that hang; one
    alone where there is a GPU, whose free memory some of them look at."""
    return 1 if torch.cuda.is_available() else min(4, 1 + (os.cpu_count() or 1))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run tests marked long, too, with 20 times the examples")
    parser.addoption("--gpu-part", type=int, choices=range(1, len(PARTS) + 1), help="of -m gpu, this part alone")


def pytest_configure(config: pytest.Config) -> None:
    # A shell's job in the background ignores interrupts, and so would all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("default", max_examples=5, deadline=None)
    settings.register_profile("long", max_examples=100, deadline=None)
    settings.load_profile("long" if config.getoption("long") else "default")


SLOWEST = (
    "test_triton_compilation",
    "test_triton",
    "test_methods_engine",
    "test_instruction_sets",
    "test_tiers_on_cuda",
    "test_generation",
    "test_swap",
    "test_cuda_path",
    "test_kernel_variants",
    "test_triton_quantized",
)
"""Files with a minute's work that cannot be shared out. They begin first, as tests on Ray and of servers do, so that no
process is left alone with one."""


def _begins_early(item: pytest.Item) -> bool:
    group = item.get_closest_marker("xdist_group")
    return item.path.stem in SLOWEST or (group is not None and group.args[0] in ("ray", "servers"))


def _is_in_bfloat16(item: pytest.Item) -> bool:
    case = getattr(item, "callspec", None)
    return case is not None and any(value is torch.bfloat16 for value in case.params.values())


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("long"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    for item in items:  # a file's tests share its fixtures, so one process runs them
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if config.option.markexpr == "gpu":
        part = config.getoption("gpu_part")
        items[:] = [item for item in items if part in (None, place(item.nodeid)[0])]
        items.sort(key=lambda item: (place(item.nodeid), not _is_in_bfloat16(item)))
    else:
        items.sort(key=lambda item: not _begins_early(item))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


FIXTURES = Path(__file__).parent / "fixtures"
Vectors = tuple[dict[str, np.ndarray], dict[str, Any]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: waking a second thread takes longer than the work. Some tests set another number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with real tokenizers, models and traces, in the checkout or beside it."""
    checkout = Path(__file__).parents[1]
    for path in (checkout / "shared", checkout.parent / "shared"):
        if path.is_dir():
            return path
    pytest.skip(f"needs the test data folder shared/ in {checkout} or beside it, which is absent")


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """`real_model(name)` is the directory of a model that `make models` has made, in the checkout or beside it."""

    def find(name: str) -> Path:
        checkout = Path(__file__).parents[1]
        for path in (checkout / "models" / name, checkout.parent / "models" / name):
            if path.is_dir():
                return path
        pytest.skip(f"needs the model {name} in {checkout / 'models'}, which is absent: run make models")

    return find


@pytest.fixture(scope="session")
def load_vectors() -> Callable[[str], Vectors]:
    """`load_vectors(name)` reads one file of golden vectors: its arrays by name, and its meta entry."""

    def load(name: str) -> Vectors:
        with np.load(FIXTURES / f"{name}.npz") as file:
            arrays = {key: file[key] for key in file.files}
        return arrays, json.loads(str(arrays.pop("meta")))

    return load


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Ray on two nodes of this machine, of four CPUs and of one.

    No worker is given up for being silent, as healthy ones are on busy cores; tests of hangs set shorter times.
    """
    ray = pytest.importorskip("ray", reason="needs ray: pip install ray")
    from ray.cluster_utils import Cluster

    from kvllm.distributed import worker_group
    from kvllm.distributed.replicas import replica_set

    with pytest.MonkeyPatch.context() as patch:
        for module in (worker_group, replica_set):
            patch.setattr(module, "START_SECONDS", 600.0)
            patch.setattr(module, "SILENCE_SECONDS", 60.0)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_worker_niceness", "0")  # else ranks starve beside the other tests
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 4, "include_dashboard": False, "object_store_memory": 80 << 20},
        )
        try:
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="WARNING")
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()
