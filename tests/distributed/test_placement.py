"""Who joins a Ray that runs already, leaves it again."""

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
