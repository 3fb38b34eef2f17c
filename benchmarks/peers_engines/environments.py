"""Virtual environments of the engines, and the checkpoints that they load, in one folder that outlives a run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import random_gguf
from benchmarks.common.shapes import SHAPES, find_model
from benchmarks.peers_engines.protocol import ChildFailed, call, reason
from benchmarks.peers_engines.registry import ENGINES, ENVIRONMENTS, Environment
from tests.helpers.gguf_files import write_gguf


class PeerFiles:
    """The folder: `NAME/` of each environment, `configs/`, `checkpoints/`, and `logs/` with what the children print."""

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
                code = subprocess.run(command, stdout=file, stderr=file, env=variables).returncode
                if code != 0:
                    raise ChildFailed(f"not installed: {reason(code, log)}")

    def model(self, name: str) -> Path:
        """The path of a model, or of a shape's GGUF file, which is written if it is absent."""
        shape = SHAPES.get(name.removesuffix(".gguf"))
        if shape is None or not name.endswith(".gguf"):
            return Path(name).resolve()
        path = self.folder / "checkpoints" / name
        if not path.exists():
            print(f"Writing random weights to {name}", flush=True)
            part = path.with_suffix(".part")
            part.parent.mkdir(parents=True, exist_ok=True)
            random_gguf.write(shape, part)
            part.rename(path)
        return path

    def checkpoint(self, model: str) -> Path:
        """The directory of a checkpoint. That of a shape gets random weights (standard deviation 0.02, seed 0)."""
        if model not in SHAPES:
            return find_model(model, self.folder)
        directory = self.folder / "checkpoints" / model
        if not directory.is_dir():
            print(f"Writing random weights of {model}", flush=True)
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(find_model(model, self.folder / "configs"))
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            with _whole(directory) as part:
                made.save_pretrained(part)
        return directory

    def converted(self, name: str, checkpoint: Path, timeout: float) -> Path:
        """The directory of the checkpoint that an engine loads. It is written if it is absent.

        Raises:
            ChildFailed: the engine's tools cannot convert the checkpoint.
        """
        engine = ENGINES[name]
        if engine.weights == "file" or engine.environment not in ("openvino", "llama_cpp"):  # with formats of their own
            return checkpoint
        form = engine.options.get("format", engine.weights)
        digest = hashlib.sha256(str(checkpoint).encode()).hexdigest()[:8]
        directory = self.folder / "checkpoints" / f"{checkpoint.name}-{engine.environment}-{form}-{digest}"
        if not directory.is_dir():
            print(f"Converting {checkpoint.name} for {name}", flush=True)
            with _whole(directory) as part:
                if engine.environment == "llama_cpp":
                    write_gguf_file(checkpoint, part / "bf16.gguf")
                job = {"checkpoint": str(checkpoint), "prepared": str(part), "options": engine.options}
                python, log = self.python(engine.environment), self.log(f"convert-{name}")
                call(python, engine.module, job | {"action": "prepare"}, log, {}, timeout)
        return directory


def write_gguf_file(checkpoint: Path, path: Path) -> None:
    """Write a checkpoint's weights in bfloat16, vectors in float32, without a tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config: Any = model.config
    config.bos_token_id, config.eos_token_id = config.bos_token_id or 0, config.eos_token_id or 0

    def without_tokenizer(writer: GGUFWriter) -> None:
        writer.add_vocab_size(config.vocab_size)
        writer.add_tokenizer_model("none")

    write_gguf(path, model, GGMLQuantizationType.BF16, change=without_tokenizer)


@contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """A new folder, which gets its name when it is complete."""
    part = directory.with_name(f"{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    part.rename(directory)
