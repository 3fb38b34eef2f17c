"""The Triton kernels without a GPU: their compilation to cubins, and the memory and instructions of these.

All compilations for one architecture are done in one process of their own, whose Triton has no interpreter.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.kernel_launches import LATENT
from tests.helpers.kernel_resources import FIGURES, SHARED_MEMORY, compiled, largest, written
from tests.helpers.processes import ROOT

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")

MARGIN = 2 << 10
"""Bytes of shared memory that stay free: other versions of Triton may take a little more."""
PARKED = 40
"""Bytes of a thread that may lie in local memory. ptxas parks a few pointers that an inner loop does not use, in order
to have one program more at a time on a multiprocessor."""
TOLERANCE = {"registers": 16, "local": 8, "shared": 4 << 10}
"""By how much a figure may exceed that of tests/kernels/resources.csv."""
CASES = [(90, "few"), *(pytest.param(capability, "every", marks=pytest.mark.long) for capability in SHARED_MEMORY)]
"""All kernels on the one architecture with every feature. Long: every size of head, dtype, format of codes and kind of
batch on every architecture, of which some have tiles of their own."""


def assert_as_written(kernels: list[dict[str, Any]], capability: int) -> None:
    """No kernel takes more than the table says, of the versions of Triton that it has."""
    table = written(capability)
    for name, figures in largest(kernels).items() if table else ():
        for figure in FIGURES:
            allowed = table[name][figure] + TOLERANCE[figure]
            message = f"{name}: {figure} {figures[figure]}; if it should be, python -m tests.helpers.kernel_resources"
            assert figures[figure] <= allowed, message


@pytest.mark.parametrize(("capability", "shapes"), CASES)
def test_every_kernel_compiles(tmp_path: Path, capability: int, shapes: str) -> None:
    """And fits on a multiprocessor, as the table says."""
    kernels = compiled(capability, shapes, TRITON_CACHE_DIR=str(tmp_path))
    sources = [path.read_text() for path in (ROOT / "kvllm" / "kernels").glob("*.py")]
    launched = {name for source in sources for name in re.findall(r"(\w+)\[\(", source)}
    assert {each["kernel"] for each in kernels} == launched
    for each in kernels:
        assert each["shared"] <= SHARED_MEMORY[capability] - MARGIN, each
        latents = each["head_dim"] == LATENT and each["dtypes"][:3] == ["bfloat16"] * 3 and not each["ragged"]
        assert each["local"] <= (0 if latents else PARKED), each
    assert_as_written(kernels, capability)
    if capability == 90:
        chunks = [each for each in kernels if each["kernel"] == "_attend_chunks" and each["tensor_cores"]]
        prefills = [each for each in chunks if each["head_dim"] <= 256]
        assert all(each["warp_groups"] and not each["local_instructions"] for each in prefills)
        # Not in small blocks, in quantized ones, and where heads have evicted KV pairs.
        assert {each["boxes"] for each in prefills} == {False, True}
