"""The environment of the other clients, and how a test runs a program there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / ".venv-clients"
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
SECONDS = 150.0


class Clients:
    """The environment. Skips the test that asks for it where it was not made."""

    def __init__(self, home: Path) -> None:
        """home: a folder for what the programs write."""
        if not (ENVIRONMENT / "ready").is_file():
            pytest.skip("needs .venv-clients with lm-eval, guidellm, litellm, langchain-openai and schemathesis: run "
                        "`make clients`")  # fmt: skip
        self._variables: Mapping[str, str] = {**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1", "HF_HOME": str(home)}
        self._home = home

    def run(self, program: str, *arguments: str) -> str:
        """What a program of the environment prints. Fails the test if the program fails."""
        command = [str(ENVIRONMENT / "bin" / program), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env=self._variables, cwd=self._home
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def call(self, module: str, *arguments: str) -> Any:
        """The JSON in the last line that a module of this package prints."""
        file = Path(__file__).with_name(f"{module}.py")
        return json.loads(self.run("python", str(file), *arguments).splitlines()[-1])
