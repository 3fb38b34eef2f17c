"""Who joins a Ray that runs already, leaves it again; whose address is wrong, is told so; and one's own lasts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ray = pytest.importorskip("ray", reason="needs ray: pip install ray")

CODE = """
import ray
from kvllm.distributed.placement import acquire_ray, release_ray
acquire_ray(1)
acquire_ray(1)
release_ray()
assert ray.is_initialized()
release_ray()
assert not ray.is_initialized()
"""


@pytest.mark.long
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray_cluster")
def test_the_last_user_leaves_a_cluster() -> None:
    """Whoever called ray.init next in the process, was told that it was called twice."""
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    subprocess.run([sys.executable, "-c", CODE], env=environment, check=True)


CODE_OF_A_THREAD = """
import threading
import ray
from kvllm.distributed.placement import acquire_ray, release_ray
thread = threading.Thread(target=acquire_ray, args=(1,))
thread.start()
thread.join()
assert ray.get(ray.remote(lambda: 5).remote(), timeout=20) == 5
release_ray()
"""


@pytest.mark.xdist_group("ray")
def test_a_ray_outlives_the_thread_that_starts_it() -> None:
    """Linux ends Ray's processes with the thread that has started them, and Ray ended this one a minute later."""
    subprocess.run(
        [sys.executable, "-c", CODE_OF_A_THREAD], env={**os.environ, "RAY_ADDRESS": "local"}, check=True, timeout=90
    )


CODE_OF_AN_ADDRESS = """
from kvllm.distributed.placement import acquire_ray
from kvllm.errors import ConfigError
try:
    acquire_ray(1)
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize("address", [pytest.param("127.0.0.1:1", id="nobody's"), pytest.param("here", id="none")])
def test_a_cluster_that_is_not_there_is_named_at_once(address: str) -> None:
    found = subprocess.check_output(
        [sys.executable, "-c", CODE_OF_AN_ADDRESS], env={**os.environ, "RAY_ADDRESS": address}, text=True, timeout=60
    )
    assert f"the Ray cluster at {address} cannot be joined" in found and "set RAY_ADDRESS" in found


CODE_OF_A_SIGNAL = """
import os, signal, sys, threading
from kvllm.distributed.placement import acquire_ray, release_ray
caught = []
signal.signal(signal.SIGTERM, lambda *_: caught.append(True))
for work in (lambda: acquire_ray(1), release_ray):
    thread = threading.Thread(target=work)
    thread.start() if sys.argv[1] == "thread" else work()
    if thread.ident:
        thread.join()
    os.kill(os.getpid(), signal.SIGTERM)
assert len(caught) == 2
"""


@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("where", [pytest.param("main", marks=pytest.mark.long), "thread"])
def test_a_program_keeps_its_handler_of_sigterm(where: str) -> None:
    """A server that had started its engine again ended at once, in the middle of its requests."""
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    subprocess.run([sys.executable, "-c", CODE_OF_A_SIGNAL, where], env=environment, check=True, timeout=90)
