"""GGUF repositories: which file is chosen, and what is downloaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFReader
from huggingface_hub import constants

from kvllm import CheckpointError
from kvllm.engine_args import DEFAULT_MODEL, EngineArgs
from kvllm.entrypoints import cli
from kvllm.files.hub import HubId, Snapshot, open_snapshot
from kvllm.files.hub_files import quantizations
from kvllm.models.config import load_model_config
from kvllm.tokenizer import find_tokenizer
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.families import FAMILIES
from tests.helpers.gguf_files import write_gguf
from tests.helpers.hub import Hub

REPO = "org/Tiny-GGUF"
SIZES = {"Q2_K": 200, "Q4_K_M": 400, "Q8_0": 800, "BF16": 1600, "F32": 3200}
FILES = {f"Tiny-1B-{tag}.gguf": b"x" * size for tag, size in SIZES.items()}
OTHERS = {"README.md": b"text", "config.json": b"{}", "mmproj-F16.gguf": b"x" * 5000, "imatrix.gguf": b"x"}


def opened(tag: str | None = None, memory: int = 1 << 40, repo: str = REPO) -> Snapshot:
    snapshot = open_snapshot(HubId(repo, tag), None, lambda: memory)
    snapshot.fetch_weights()
    return snapshot


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("Qwen3-0.6B-Q4_K_M", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m", "q4_k_m"),
        ("gemma-3-4b-it-UD-IQ2_XXS", "UD-IQ2_XXS"),
        ("model.Q5_K_S", "Q5_K_S"),
        ("gpt-oss-20b-mxfp4", "mxfp4"),
        ("Llama-3.2-1B-Instruct-f16", "f16"),
        ("Mistral-BF16", "BF16"),
        ("phi-2", "phi-2"),
        ("ggml-model-TQ1_0", "TQ1_0"),
    ],
)
def test_tags(name, tag):
    assert [each.tag for each in quantizations({f"{name}.gguf": 1})] == [tag]


@pytest.mark.parametrize("tag", ["Q4_K_M", "q4_k_m", "Tiny-1B-Q4_K_M"])
def test_the_file_that_was_asked_for(tag, hub):
    hub.add(REPO, FILES | OTHERS)
    path = opened(tag).path
    assert path.name == "Tiny-1B-Q4_K_M.gguf" and path.read_bytes() == FILES[path.name]
    assert hub.got() == {path.name}


@pytest.mark.parametrize(("memory", "tag"), [(300, "Q2_K"), (1000, "Q4_K_M"), (1100, "Q8_0"), (1 << 40, "BF16")])
def test_the_best_that_fits(memory, tag, hub, caplog):
    hub.add(REPO, FILES | OTHERS)
    caplog.set_level(logging.INFO, "kvllm")
    assert opened(memory=memory).path.name == f"Tiny-1B-{tag}.gguf"
    assert f"{REPO}:{tag} (0.00 GiB) is the best that fits in this machine's memory" in caplog.text
    assert "there are Q2_K, Q4_K_M, Q8_0, BF16, F32" in caplog.text


def test_what_cannot_be_read_is_not_chosen(hub):
    others = ("UD-IQ2_XXS", "IQ3_M", "TQ1_0", "model-imatrix")
    hub.add(REPO, FILES | {f"Tiny-1B-{tag}.gguf": b"x" * 300 for tag in others})
    assert opened(memory=450).path.name == "Tiny-1B-Q2_K.gguf"
    assert opened("IQ3_M").path.name == "Tiny-1B-IQ3_M.gguf"


def test_an_engine_tells_the_memory_of_its_machine(hub):
    hub.add(REPO, FILES)
    large = "Tiny-1B-BF16.gguf"
    hub.repos[REPO][large] = replace(hub.repos[REPO][large], size=1 << 60)
    snapshot = EngineArgs(REPO).snapshot
    assert snapshot is not None and snapshot.path.name == "Tiny-1B-Q8_0.gguf"


def test_none_fits(hub):
    hub.add(REPO, FILES)
    with pytest.raises(CheckpointError, match=rf"the smallest model of {REPO}, Q2_K, has .*, or insist with .*:Q2_K"):
        opened(memory=200)
    assert hub.got() == set()


def test_the_only_file_needs_no_choice(hub, caplog):
    hub.add(REPO, {"phi-2.gguf": b"model"})
    assert opened(memory=0).path.name == "phi-2.gguf" and "best" not in caplog.text


def test_all_parts_of_a_split_file(hub):
    parts = {f"Q8_0/Tiny-Q8_0-0000{number}-of-00003.gguf": b"part %d" % number for number in (1, 2, 3)}
    hub.add(REPO, parts | {"Tiny-Q4_0.gguf": b"model"})
    snapshot = opened("Q8_0")
    assert hub.got() == set(parts)
    assert snapshot.path == snapshot.folder / "Q8_0" / "Tiny-Q8_0-00001-of-00003.gguf"
    assert [(snapshot.folder / name).read_bytes() for name in parts] == list(parts.values())


def test_a_tag_in_a_repository_with_safetensors(hub):
    hub.add(REPO, {"config.json": b"{}", "model.safetensors": b"", "model-Q8_0.gguf": b"model"})
    assert opened("Q8_0").path.name == "model-Q8_0.gguf"
    assert opened().path.is_dir()


def test_factors_of_rope_come_with_the_header(hub, tmp_path, monkeypatch):
    """Numbers of the config that lie among the weights."""
    path = tmp_path / "tiny-F32.gguf"
    write_gguf(path, make_checkpoint(tmp_path / "theirs", **FAMILIES["llama3-rope"]))
    hub.add(REPO, {path.name: path.read_bytes()})
    monkeypatch.setattr("kvllm.files.hub_headers.FIRST_BYTES", GGUFReader(path).data_offset)
    args = EngineArgs(REPO)  # the headers go with it
    described = args.described_path
    assert described.read_bytes() != path.read_bytes()
    assert load_model_config(described) == load_model_config(path)


def test_what_tags_cannot_be(hub):
    hub.add(REPO, FILES)
    with pytest.raises(
        CheckpointError, match=rf"{REPO} has no Q4_K_S; did you mean Q4_K_M\?: choose one of Q2_K, Q4_K"
    ):
        opened("Q4_K_S")
    hub.add("org/several", {"a-Q8_0.gguf": b"a", "b-Q8_0.gguf": b"b"})
    with pytest.raises(
        CheckpointError, match=r"several models in Q8_0: choose one of org/several:a-Q8_0, org/several:b"
    ):
        opened("Q8_0", repo="org/several")
    assert opened("b-Q8_0", repo="org/several").path.read_bytes() == b"b"
    hub.add("org/plain", {"config.json": b"{}", "model.safetensors": b""})
    with pytest.raises(CheckpointError, match=r"org/plain:Q8_0 names a quantization, .* leave :Q8_0 out"):
        opened("Q8_0", repo="org/plain")


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., bytes]:
    """A file of a tiny Llama with the given architecture."""

    def written(architecture: str = "llama") -> bytes:
        path = tmp_path / f"{architecture}.gguf"
        write_gguf(path, make_checkpoint(tmp_path / "transformers", "llama"))
        data = path.read_bytes()
        return data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0" + architecture.encode())

    return written


def ranges(hub: Hub) -> list[str | None]:
    return [wanted for method, path, wanted in hub.requests if method == "GET" and path.endswith(".gguf")]


@pytest.mark.parametrize("first", [64, 1 << 20])
def test_plan_downloads_headers_alone(first, hub, model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvllm.files.hub_headers.FIRST_BYTES", first)
    data = model()
    hub.add(REPO, {"Tiny-Q8_0.gguf": data, "Tiny-F32.gguf": data})
    cli.main(["plan", f"{REPO}:Q8_0", "--json"])
    planned = capsys.readouterr().out
    cli.main(["plan", str(tmp_path / "llama.gguf"), "--json"])
    assert planned == capsys.readouterr().out
    asked = ranges(hub)
    assert len(asked) == len(set(asked)) and asked[0] == f"bytes=0-{min(first, len(data)) - 1}"
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.gguf"))


def test_a_model_that_is_not_known_is_refused_before_its_weights(hub, model, monkeypatch):
    monkeypatch.setattr("kvllm.files.hub_headers.FIRST_BYTES", 1 << 20)
    hub.add(REPO, {"Tiny-Q8_0.gguf": model("mamba")})
    with pytest.raises(CheckpointError, match="mamba"):
        _ = EngineArgs(REPO).path
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.gguf"))


def test_no_more_of_a_damaged_file_comes_than_a_header_has(hub, model, monkeypatch):
    monkeypatch.setattr("kvllm.files.hub_headers.FIRST_BYTES", 64)
    monkeypatch.setattr("kvllm.files.hub_headers.MOST_BYTES", 1000)
    hub.add(REPO, {"Tiny-Q8_0.gguf": b"GGUF" + b"\xff" * 5000})
    with pytest.raises(CheckpointError):
        _ = EngineArgs(REPO).path
    assert ranges(hub) == ["bytes=0-63", "bytes=0-255", "bytes=0-999"]


def test_a_tokenizer_by_its_id(hub, model):
    hub.add(REPO, {"Tiny-Q8_0.gguf": model()})
    hub.add_folder("org/base", Path(DEFAULT_MODEL))
    files = EngineArgs(REPO, tokenizer="org/base").tokenizer_files
    assert find_tokenizer(files) and not (files.path / "model.safetensors").exists()
    parts = {name: (DEFAULT_MODEL / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    hub.add("org/tokenizer", {**parts, "README.md": b"text"})
    assert find_tokenizer(EngineArgs(REPO, tokenizer="org/tokenizer").tokenizer_files)
    assert EngineArgs(DEFAULT_MODEL, tokenizer=REPO).tokenizer_path.name == "Tiny-Q8_0.gguf"
