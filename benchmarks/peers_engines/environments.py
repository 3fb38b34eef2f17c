"""Virtual environments of the engines, and the checkpoints that they load, in one folder that outlives a run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.common.shapes import SHAPES
from benchmarks.peers_engines.protocol import ChildFailed, call
from benchmarks.peers_engines.registry import ENGINES, ENVIRONMENTS, Environment


class PeerFiles:
    """The folder: `NAME/` of each environment, `checkpoints/`, and `logs/` with what the children print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def python(self, name: str | None) -> Path:
        """The interpreter of an environment, which is made if it is absent or has other packages. None: this one.

        Raises:
            ChildFailed: the packages cannot be installed.
        """
        if name is None:
            return Path(sys.executable)
        directory, environment = self.folder / name, ENVIRONMENTS[name]
        ready, content = directory / "requirements.txt", "\n".join(environment.requirements) + "\n"
        if not ready.is_file() or ready.read_text() != content:
            print(f"Installing {name}: {', '.join(environment.requirements)}", flush=True)
            self._install(name, directory, environment)
            ready.write_text(content)
        return directory / "bin" / "python"

    def _install(self, name: str, directory: Path, environment: Environment) -> None:
        directory.parent.mkdir(parents=True, exist_ok=True)
        pip = [str(directory / "bin" / "python"), "-m", "pip"]
        commands = [
            [sys.executable, "-m", "venv", "--clear", str(directory)],
            [*pip, "install", "--quiet", *environment.requirements],
        ]
        if environment.removed:
            commands.append([*pip, "uninstall", "--quiet", "--yes", *environment.removed])
        log = self.log(f"install-{name}")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            for command in commands:
                variables = os.environ | environment.variables
                if subprocess.run(command, stdout=file, stderr=file, env=variables).returncode != 0:
                    raise ChildFailed(f"not installed: {_last_error(log)}")

    def config(self, model: str) -> Path:
        """The directory of the model's config.json."""
        if model not in SHAPES:
            return Path(model).resolve()
        directory = self.folder / "checkpoints" / f"{model}-config"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(SHAPES[model]))
        return directory

    def checkpoint(self, model: str) -> Path:
        """The directory of a checkpoint. That of a shape gets random weights (standard deviation 0.02, seed 0)."""
        if model not in SHAPES:
            return Path(model).resolve()
        directory = self.folder / "checkpoints" / model
        if not (directory / "config.json").is_file():
            print(f"Writing random weights of {model}", flush=True)
            _write_random(model, directory)
        return directory

    def converted(self, name: str, checkpoint: Path, timeout: float) -> Path:
        """The directory of the checkpoint that an engine loads. It is written if it is absent.

        Raises:
            ChildFailed: the engine's tools cannot convert the checkpoint.
        """
        engine = ENGINES[name]
        if not engine.converts:
            return checkpoint
        options = json.dumps({key: value for key, value in engine.options.items() if key not in ("kv", "evicts")})
        digest = hashlib.sha256(f"{checkpoint} {engine.module} {options}".encode()).hexdigest()[:8]
        directory = self.folder / "checkpoints" / f"{checkpoint.name}-{engine.environment}-{digest}"
        if not directory.is_dir():
            print(f"Converting {checkpoint.name} for {name}", flush=True)
            part = directory.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            job = {
                "action": "prepare",
                "checkpoint": str(checkpoint),
                "prepared": str(part),
                "options": engine.options,
            }
            call(self.python(engine.environment), engine.module, job, self.log(f"convert-{name}"), {}, timeout)
            part.rename(directory)
        return directory


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1][:200]


def _write_random(model: str, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    part = directory.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    (part / "config.json").write_text(json.dumps(SHAPES[model]))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(part)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(part)
    shutil.rmtree(directory, ignore_errors=True)
    part.rename(directory)
