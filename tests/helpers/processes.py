"""Code that needs a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_python(code: str, module: str, **environment: str) -> Any:
    """The JSON that `code` prints last, run in a process of its own with what is in a module."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", f"from {module} import *; {code}"],
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
