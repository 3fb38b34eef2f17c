"""The examples of README and docs, as they stand there."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

from kvllm import LLM, CompressionConfig
from kvllm.entrypoints.cli import make_parser
from tests.helpers.adapters import make_adapter
from tests.helpers.checkpoints import edit, make_checkpoint
from tests.helpers.hub import reachable_hub
from tests.helpers.parrot_chat import make_parrot_chat
from tests.helpers.processes import ROOT
from tests.helpers.server import ServerProcess
from tests.helpers.tokenizers import byte_level

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
MODEL, DIRECTORY = "Qwen/Qwen3-0.6B", "path/to/Qwen3-0.6B"
RERANKER = "Qwen/Qwen3-Reranker-0.6B"
ELSEWHERE = ("add-a-model.md", "add-a-method.md")
"""Pages whose examples are files, which tests of models and of methods from outside add."""


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text()) if language in languages]


def has_server(code: str) -> bool:
    return "client" in code or "anthropic" in code


PYTHON = {
    page.name: found
    for page in PAGES
    if page.name not in ELSEWHERE and (found := [code for code in blocks(page, "python") if not has_server(code)])
}
COMMANDS = [
    line.split("  #")[0]
    for page in PAGES
    for block in blocks(page, "", "bash")
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("kvllm ")
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small model where the pages have theirs: in a directory, and on a hub."""
    path = tmp_path / DIRECTORY
    tokenizer = byte_level("chat").hf
    tokenizer.add_tokens(["no", "yes"])  # which rerankers answer with
    make_checkpoint(path, "qwen3", vocab_size=len(tokenizer), num_hidden_layers=1, head_dim=64)
    tokenizer.save_pretrained(path)
    edit(path, max_position_embeddings=512)
    (path / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    make_adapter(tmp_path / "path/to/adapter", path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with reachable_hub(tmp_path / "cache", monkeypatch) as hub:
        hub.add_folder(MODEL, path)
        hub.add_folder(RERANKER, path)
        yield


@pytest.mark.parametrize("page", [page for page in PYTHON if page != "distributed.md"])
def test_examples_in_python(page: str, model: None) -> None:
    names: dict[str, Any] = {"LLM": LLM, "CompressionConfig": CompressionConfig, "model": DIRECTORY}
    for code in PYTHON[page]:
        exec(compile(code, page, "exec"), names)


@pytest.mark.long
def test_examples_with_several_processes(model: None, ray_cluster: None) -> None:
    names: dict[str, Any] = {}
    for code in PYTHON["distributed.md"]:
        for line in code.splitlines():
            exec(line, names)
            if llm := names.pop("llm", None):
                llm.shutdown()


def test_examples_with_a_server(tmp_path: Path) -> None:
    class Person(pydantic.BaseModel):
        age: bool

    make_parrot_chat(tmp_path)
    server = ServerProcess(str(tmp_path), "--kv-cache-memory-bytes", "64M", "--served-model-name", "reasoner", "m")
    names: dict[str, Any] = {"Person": Person}
    try:
        for code in filter(has_server, blocks(ROOT / "docs" / "serving.md", "python")):
            exec(compile(code.replace("http://127.0.0.1:8000", server.url), "serving.md", "exec"), names)
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, model: None, tmp_path: Path) -> None:
    """They are read: what they do is tested elsewhere."""
    shutil.copy(ROOT / "README.md", tmp_path / "FILE")
    words = shlex.split(command, comments=True)
    redirected = next((i for i, word in enumerate(words) if word in "<>"), len(words))
    make_parser().parse_args(words[1:redirected])
