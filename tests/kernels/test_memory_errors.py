"""The memory checker of CUDA over what is most likely to read elsewhere: prefills, whose tiles come asynchronously."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.processes import ROOT

CHECKED = "test_decodes_and_chunks and triton and cuda and (128-4-256 or 128-2-16)"


@pytest.mark.gpu
def test_prefills_and_decodes_access_what_is_theirs() -> None:
    if (checker := shutil.which("compute-sanitizer")) is None:
        pytest.skip("needs compute-sanitizer, which is not installed")
    command = [checker, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9", sys.executable]
    tests = ["-m", "pytest", "-q", "-m", "gpu", "tests/attention/test_attention_devices.py", "-k", CHECKED]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    found = subprocess.run([*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0 and "passed" in found.stdout, found.stdout[-4000:]
