"""Adapters by their ids on a hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvllm import LLM, RequestError
from kvllm.engine_args import EngineArgs
from kvllm.entrypoints import cli
from kvllm.lora.request import LoRARequest
from kvllm.serving.adapters import open_modules
from tests.helpers.adapters import make_adapter
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.engines import greedy
from tests.helpers.hub import Hub

REPO = "org/sql-adapter"
NOT_READ = {"README.md": b"text", "adapter_model.bin": b"a second copy", "checkpoint-1/optimizer.pt": b"state"}
READ = {"adapter_config.json", "adapter_model.safetensors"}


base = checkpoint_fixture("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), base)


def test_the_tokens_of_an_id_are_those_of_the_directory(hub: Hub, base: Path, adapter: Path) -> None:
    hub.add_folder(REPO, adapter, **NOT_READ)
    llm = LLM(base, enable_lora=True, block_size=16, num_gpu_blocks_override=16, device="cpu")

    def tokens(path: str | None) -> list[int]:
        request = None if path is None else LoRARequest("sql", 1, path)
        [output] = llm.generate([[1, 5, 9, 33]], greedy(12), use_tqdm=False, lora_request=request)
        return list(output.outputs[0].token_ids)

    assert tokens(REPO) == tokens(str(adapter)) != tokens(None)
    assert hub.got() == READ
    hub.requests.clear()
    assert tokens(REPO) == tokens(str(adapter))
    assert not hub.requests  # an engine asks once


def test_modules_of_a_server_and_pull(
    hub: Hub, base: Path, adapter: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add_folder(REPO, adapter, **NOT_READ)
    [opened] = open_modules(EngineArgs(base, enable_lora=True), {"sql": REPO}, ("base",)).values()
    folder = cache / "models--org--sql-adapter" / "snapshots" / hub.commit(REPO)
    assert opened.path == str(folder) and {file.name for file in folder.iterdir()} == READ
    shutil.rmtree(cache)
    cli.main(["pull", "--lora", REPO])
    assert capsys.readouterr().out.strip() == str(folder) and {file.name for file in folder.iterdir()} == READ


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"},
            "has no adapter_model.safetensors, but adapter_",
        ),
        (
            {"model.safetensors": b"", "config.json": b"{}"},
            "has no adapter_config.json, adapter_model.safetensors, but",
        ),
        (None, f"lora_path='{REPO}': {REPO} is neither a directory nor a model at http"),
    ],
)
def test_what_is_no_adapter(hub: Hub, base: Path, files: dict[str, bytes] | None, message: str) -> None:
    if files is not None:
        hub.add(REPO, files)
    with pytest.raises(RequestError, match=message):
        open_modules(EngineArgs(base, enable_lora=True), {"sql": REPO}, ())
    assert not hub.got()
