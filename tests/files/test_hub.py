"""Models by their ids on a hub: what is downloaded, how often the hub is asked, and what is in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from kvllm import LLM, CheckpointError, SamplingParams
from kvllm.engine_args import EngineArgs
from kvllm.files.hub import HubId, hub_id
from kvllm.models.config import load_model_config
from tests.helpers.hub import File, Hub

REPO = "org/tiny-llama"
OPTIONS = {"block_size": 16, "num_gpu_blocks_override": 16, "device": "cpu"}
NOT_READ = {
    "README.md": b"text",
    ".gitattributes": b"text",
    "consolidated.safetensors": b"a second copy",
    "model.fp32.safetensors": b"a second copy",
    "pytorch_model.bin": b"a second copy",
    "original/consolidated.00.pth": b"a second copy",
    "onnx/model.onnx": b"a second copy",
}
READ = {
    "kv_layer_losses.json": b"{}",
    "kv_statistics.safetensors": b"statistics",
    "chat_template.jinja": b"{{ messages }}",
}


def upload(hub: Hub, checkpoint: Path) -> None:
    hub.add_folder(REPO, checkpoint, **NOT_READ, **READ)


def fetch(**options) -> EngineArgs:
    args = EngineArgs(REPO, **options)
    args.fetch_weights()
    return args


def test_the_tokens_of_an_id_are_those_of_the_directory(hub, checkpoint):
    hub.add_folder(REPO, checkpoint, **NOT_READ)
    prompts = [[1, 5, 9, 33], [1, 200, 7]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found, expected = (
        [output.outputs[0].token_ids for output in LLM(model, **OPTIONS).generate(prompts, params, use_tqdm=False)]
        for model in (REPO, checkpoint)
    )
    assert found == expected and all(len(tokens) == 12 for tokens in found)


def test_only_what_is_read_is_downloaded(hub, cache, checkpoint):
    upload(hub, checkpoint)
    path = fetch().path
    expected = {file.name: file.read_bytes() for file in checkpoint.iterdir()} | READ
    assert len(expected) > 6 and hub.got() == set(expected)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == expected
    assert path.is_relative_to(cache) and path.name == hub.commit(REPO)


def test_weights_come_after_the_description(hub, checkpoint):
    upload(hub, checkpoint)
    args = EngineArgs(REPO)
    assert args.model_config == load_model_config(checkpoint)
    assert not [name for name in hub.got() if name.startswith("model-")]
    EngineArgs(REPO, load_format="dummy").fetch_weights()
    assert not [name for name in hub.got() if name.startswith("model-")]
    args.fetch_weights()
    assert [name for name in hub.got() if name.startswith("model-")]


def test_one_file_of_weights_comes_before_shards(hub, checkpoint):
    hub.add_folder(REPO, checkpoint, **{"model.safetensors": b"all", "model.gguf": b"all"})
    fetch()
    assert {name for name in hub.got() if name.startswith("model-")} == set()
    assert "model.safetensors" in hub.got() and "model.gguf" not in hub.got()


def test_shards_without_an_index(hub, checkpoint):
    hub.add_folder(REPO, checkpoint)
    del hub.repos[REPO]["model.safetensors.index.json"]
    fetch()
    assert {name for name in hub.got() if name.startswith("model-")} == {
        file.name for file in checkpoint.glob("model-*.safetensors")
    }


def test_a_cut_transfer_goes_on_where_it_was(hub, checkpoint, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 12)
    upload(hub, checkpoint)
    name = min(file.name for file in checkpoint.glob("model-*.safetensors"))
    hub.cut = {name}
    path = fetch().path
    ranges = [each for method, asked, each in hub.requests if method == "GET" and asked.endswith(name)]
    half = (checkpoint / name).stat().st_size // 2
    assert ranges == [None, f"bytes={half - half % (1 << 12)}-"]
    assert (path / name).read_bytes() == (checkpoint / name).read_bytes()


def test_what_is_there_is_not_downloaded_again(hub, checkpoint):
    upload(hub, checkpoint)
    first = fetch()
    hub.requests.clear()
    assert fetch().path == first.path
    assert [path for _, path, _ in hub.requests] == [f"/api/models/{REPO}"]
    hub.requests.clear()
    assert fetch(revision=first.commit).path == first.path
    assert hub.requests == []


def test_the_hub_is_asked_once_for_an_engine(hub, checkpoint):
    upload(hub, checkpoint)
    llm = LLM.from_engine_args(EngineArgs(REPO, **OPTIONS))
    assert [path for _, path, _ in hub.requests].count(f"/api/models/{REPO}") == 1
    assert llm.engine_args.model == REPO and llm.engine_args.commit == hub.commit(REPO)


def test_a_tag_is_a_revision(hub, checkpoint):
    upload(hub, checkpoint)
    assert fetch(revision="v1").path.name == hub.commit(REPO)
    assert f"/api/models/{REPO}/revision/v1" in [path for _, path, _ in hub.requests]


def test_the_token_is_sent(hub, checkpoint, monkeypatch):
    upload(hub, checkpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch()
    assert hub.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "config.json"])
def test_a_file_with_another_content_is_removed(name, hub, checkpoint):
    upload(hub, checkpoint)
    name = name if name == "config.json" else min(file.name for file in checkpoint.glob("model-*.safetensors"))
    right = hub.repos[REPO][name]
    content = bytes([right.content[0] ^ 1]) + right.content[1:]
    hub.repos[REPO][name] = File(content, right.is_large, right.size, right.sha256, right.git_hash)
    with pytest.raises(CheckpointError, match=f"{name} of {REPO} came with another content .* try again"):
        fetch()
    hub.repos[REPO][name] = right
    assert (fetch().path / name).read_bytes() == right.content


# Without the hub


def test_offline_what_is_in_the_cache_is_enough(hub, checkpoint, monkeypatch):
    upload(hub, checkpoint)
    path = fetch().path
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch().path == path and hub.requests == []


def test_offline_with_the_cache_of_a_program_that_keeps_no_list(hub, checkpoint, monkeypatch):
    upload(hub, checkpoint)
    path = fetch().path
    for file in (path.parents[1] / "trees").iterdir():
        file.unlink()
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch().path == path


@pytest.mark.parametrize("part", ["nothing", "the description"])
def test_offline_without_all_of_it(part, hub, checkpoint, monkeypatch):
    upload(hub, checkpoint)
    if part == "the description":
        _ = EngineArgs(REPO).path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=rf"{REPO} is not in the cache .*, or not all of it, .* unset HF_HUB_OFF"):
        fetch()


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_refuses_for_now(status, hub, checkpoint):
    upload(hub, checkpoint)
    path = fetch().path
    hub.refuse = lambda method, asked: (status, {})
    assert fetch().path == path


def test_a_hub_that_is_away(hub, checkpoint, monkeypatch):
    upload(hub, checkpoint)
    path = fetch().path
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert fetch().path == path
    with pytest.raises(CheckpointError, match=r"org/other is no directory, and http://127.0.0.1:9 cannot be reached"):
        _ = EngineArgs("org/other").path


# Names


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B", None)),
        ("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", HubId("bartowski/Llama-3.2-1B-Instruct-GGUF", "Q4_K_M")),
        (Path("Qwen/Qwen3-0.6B"), None),
        ("Qwen3-0.6B", None),
        ("/models/Qwen3", None),
        ("./models/Qwen3", None),
        ("../Qwen3", None),
        ("~/Qwen3", None),
        ("a/b/c", None),
        ("a/", None),
        ("models/tiny.gguf", None),
        ("configs/qwen.json", None),
        ("org/na me", None),
        ("org/name:", None),
    ],
)
def test_what_is_an_id(model, expected):
    assert hub_id(model) == expected


def test_a_directory_wins(hub, checkpoint, tmp_path, monkeypatch):
    upload(hub, checkpoint)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / REPO).symlink_to(checkpoint)
    assert EngineArgs(REPO).path == Path(REPO) and hub.requests == []
    assert EngineArgs(REPO, revision="v1").model_config == load_model_config(checkpoint)


def test_a_model_that_is_neither(monkeypatch):
    with pytest.raises(CheckpointError, match="nowhere is not a directory: give the directory .* or the id ORG/NAME"):
        _ = EngineArgs("nowhere").model_config


def test_a_file_in_the_store_that_repositories_share(hub, checkpoint, tmp_path):
    """There it has the name that the store gives it, which is not its SHA-256."""
    hub.add_folder(REPO, checkpoint)
    args = EngineArgs(REPO)
    shared = tmp_path / ("0" * 64)
    name = min(file.name for file in checkpoint.glob("model-*.safetensors"))
    shared.write_bytes((checkpoint / name).read_bytes())
    blob = args.path.parents[1] / "blobs" / hub.repos[REPO][name].sha256
    blob.symlink_to(shared)
    args.fetch_weights()
    assert name not in hub.got() and (args.path / name).resolve() == shared
