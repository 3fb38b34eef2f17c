"""What goes wrong with a hub: each error says what was asked for and what to do, and no weights were asked for."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from kvllm import LLM, CheckpointError
from kvllm.engine_args import EngineArgs
from kvllm.files.hub_errors import explained
from tests.helpers.hub import Hub

REPO = "org/tiny-llama"


def refusal(hub: Hub, model: str = REPO, **options) -> str:
    """The error of LLM, after which no weights have been asked for."""
    with pytest.raises(CheckpointError) as caught:
        LLM(model, device="cpu", num_gpu_blocks_override=8, **options)
    assert not [name for name in hub.got() if name.endswith((".safetensors", ".gguf", ".bin"))]
    return str(caught.value)


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (401, {"X-Error-Code": "RepoNotFound"}, "org/tiny-llama is neither a directory nor a model at HUB: give the d"),
        (401, {}, "HUB refuses org/tiny-llama without a valid token (401): give one in HF_TOKEN"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "without a valid token (401): give"),
        (403, {"X-Error-Message": "Forbidden"}, "HUB forbids org/tiny-llama (403): give a token in HF_TOKEN that may"),
        (404, {"X-Error-Code": "RepoNotFound"}, "org/tiny-llama is neither a directory nor a model at HUB"),
        (429, {}, "HUB gives org/tiny-llama to this address no more for now (429, too many requests): wait"),
        (503, {}, "HUB fails (503) at org/tiny-llama, after some tries: try again later"),
        (418, {}, "HUB refuses org/tiny-llama (418): check the id, the revision and HF_ENDPOINT"),
    ],
)
def test_a_hub_that_refuses(status, headers, message, hub, checkpoint):
    hub.add_folder(REPO, checkpoint)
    hub.refuse = lambda method, path: (status, headers)
    assert message.replace("HUB", hub.url) in refusal(hub)


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (
            401,
            {"X-Error-Code": "GatedRepo"},
            "org/tiny-llama is gated: accept its terms at HUB/org/tiny-llama, and give",
        ),
        (
            403,
            {"X-Error-Code": "GatedRepo"},
            "org/tiny-llama is gated: accept its terms at HUB/org/tiny-llama, and give",
        ),
        (429, {}, "(429, too many requests): wait some minutes"),
        (503, {}, "HUB fails (503) at org/tiny-llama, after some tries"),
    ],
)
def test_a_hub_that_refuses_files(status, headers, message, hub, checkpoint):
    """A gated model can be described to everyone, but its files are for those who accepted its terms."""
    hub.add_folder(REPO, checkpoint)
    hub.refuse = lambda method, path: (status, headers) if "/resolve/" in path else None
    assert message.replace("HUB", hub.url) in refusal(hub)
    asked = [path for _, path, _ in hub.requests if path.endswith("/config.json")]
    assert len(asked) > (1 if status in (429, 503) else 0)  # huggingface_hub tries again


def test_a_short_failure_is_not_noticed(hub, checkpoint):
    hub.add_folder(REPO, checkpoint)
    left = [(503, {}), (429, {"Retry-After": "1"})]
    hub.refuse = lambda method, path: left.pop() if "/resolve/" in path and left else None
    args = EngineArgs(REPO)
    args.fetch_weights()
    assert not left and (args.path / "config.json").is_file()


def test_a_wrong_revision(hub, checkpoint):
    hub.add_folder(REPO, checkpoint)
    message = f"{REPO} has no revision v9: give a branch, a tag or a commit of {hub.url}/{REPO}, or none for main"
    assert refusal(hub, revision="v9") == message
    assert "has no revision" in refusal(hub, revision="0" * 40)


def test_a_mistyped_directory(hub, tmp_path, monkeypatch):
    (tmp_path / "models" / "SmolLM2-135M").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "; did you mean models/SmolLM2-135M?: give" in refusal(hub, "models/SmolLM-135M")
    assert "org/a--b is neither a directory nor a model" in refusal(hub, "org/a--b")
    assert "nor a model" in refusal(hub, "org/model.git")


def test_an_architecture_that_kvllm_has_not(hub, checkpoint):
    config = json.loads((checkpoint / "config.json").read_bytes()) | {"architectures": ["MambaForCausalLM"]}
    hub.add_folder(REPO, checkpoint, **{"config.json": json.dumps(config).encode()})
    message = refusal(hub)
    assert "models--org--tiny-llama" in message
    assert "unsupported architecture MambaForCausalLM, which has state spaces: kvllm runs Cohere2" in message


def test_options_that_do_not_fit_the_model(hub, checkpoint):
    hub.add_folder(REPO, checkpoint)
    with pytest.raises(ValueError, match="max_model_len=1000000 is not allowed"):
        LLM(REPO, max_model_len=1_000_000)
    assert not [name for name in hub.got() if name.endswith(".safetensors")]


def test_no_weights_of_a_known_kind(hub, checkpoint):
    hub.add("org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"", "consolidated.safetensors": b""})
    message = refusal(hub, "org/pickled")
    assert message.startswith(
        "org/pickled has its weights in consolidated.safetensors, pytorch_model.bin only: kvllm r"
    )
    assert "or .gguf" in message
    hub.add("org/data", {"README.md": b"", "a.csv": b""})
    assert refusal(hub, "org/data").startswith("org/data has only README.md, a.csv: kvllm reads model.safetensors")
    hub.add("org/weights", {"model.safetensors": b""})
    assert refusal(hub, "org/weights").startswith("org/weights has no config.json, but model.safetensors: give")


def test_an_index_of_files_that_are_absent(hub, checkpoint):
    hub.add_folder(REPO, checkpoint)
    name = min(file.name for file in checkpoint.glob("model-*.safetensors"))
    del hub.repos[REPO][name]
    assert f"index.json names files that are absent, {name}: use another" in refusal(hub)


def test_a_disk_without_room(hub, checkpoint, cache):
    hub.add_folder(REPO, checkpoint)
    name = min(file.name for file in checkpoint.glob("model-*.safetensors"))
    hub.repos[REPO][name] = replace(hub.repos[REPO][name], size=1 << 60)
    message = refusal(hub)
    assert message.startswith(f"{REPO} needs 1,073,741,824.00 GiB more in {cache}, and ")
    assert message.endswith("make room (kvllm list, kvllm rm), or set HF_HOME to a directory on a larger disk")
    assert shutil.disk_usage(cache).free < 1 << 60


def test_files_of_another_commit_need_no_room(hub, checkpoint, monkeypatch):
    """A new commit of the same weights, on a disk that is full, with them alone: they are linked."""
    hub.add_folder(REPO, checkpoint)
    first, second = EngineArgs(REPO), EngineArgs(REPO)
    first.fetch_weights()
    hub.add_folder(REPO, checkpoint, **{"NEWS.md": b"text"})
    hub.requests.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
    second.fetch_weights()
    assert second.path != first.path and second.path.name == hub.commit(REPO) and hub.got() == set()


def test_a_disk_that_becomes_full():
    """Writing to /dev/full fails as a full disk does."""
    message = f"the disk of {constants.HF_HUB_CACHE} became full while {REPO} was downloaded: make room"
    with pytest.raises(CheckpointError) as caught, explained(REPO, None), open("/dev/full", "w") as file:
        file.write("x" * (1 << 20))
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC


def test_a_cache_that_is_no_directory(hub, checkpoint, cache: Path):
    cache.write_text("a file")
    hub.add_folder(REPO, checkpoint)
    assert f"{REPO} cannot be downloaded to {cache}" in refusal(hub)
