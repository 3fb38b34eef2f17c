"""kvllm pull, list and rm, and other commands with the id of a model."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvllm.engine_args import DEFAULT_MODEL, EngineArgs
from kvllm.entrypoints import cli
from kvllm.entrypoints.serve import read_options
from kvllm.files.hub import HubId, open_snapshot

REPO, GGUF = "org/tiny-llama", "org/Tiny-GGUF"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    cli.main(arguments)
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return caught.value.code, capsys.readouterr().err


def test_pull_list_and_rm(hub, checkpoint, cache, capsys):
    hub.add_folder(REPO, checkpoint)
    assert f"no models in {cache}" in run(capsys, "list")
    path = run(capsys, "pull", REPO).strip()
    assert path == str(cache / "models--org--tiny-llama" / "snapshots" / hub.commit(REPO))
    assert hub.got() == {file.name for file in checkpoint.iterdir()}
    head, line = run(capsys, "list").splitlines()
    assert head.split() == ["MODEL", "REVISION", "SIZE", "USED"] and line.split()[:2] == [REPO, "main"]
    assert run(capsys, "rm", REPO).startswith(f"Removed: {REPO}, 0.00 GiB")
    assert "no models" in run(capsys, "list") and not os.path.exists(path)


def test_rm_of_a_revision(hub, checkpoint, capsys):
    hub.add_folder(REPO, checkpoint)
    run(capsys, "pull", REPO)
    old = hub.commit(REPO)
    hub.add_folder(REPO, checkpoint, **{"chat_template.jinja": b"{{ messages }}"})
    run(capsys, "pull", REPO)
    assert [line.split()[:2] for line in run(capsys, "list").splitlines()[1:]] == [[REPO, "main"], [REPO, old[:12]]]
    assert refusal(capsys, "rm", REPO, "--revision", "v7")[1].startswith(
        f"error: {REPO} has no revision v7 in the cach"
    )
    run(capsys, "rm", REPO, "--revision", old[:12])
    assert [line.split()[:2] for line in run(capsys, "list").splitlines()[1:]] == [[REPO, "main"]]
    hub.requests.clear()
    run(capsys, "pull", REPO)
    assert hub.got() == set()  # the files that both revisions had are still there


def test_rm_of_a_quantization(hub, capsys):
    hub.add(GGUF, {"Tiny-Q4_0.gguf": b"small", "Tiny-Q8_0.gguf": b"large"})
    for tag in ("Q4_0", "Q8_0"):
        open_snapshot(HubId(GGUF, tag), None, lambda: 0).fetch_weights()
    assert run(capsys, "list").splitlines()[1].split()[0] == f"{GGUF}:Q4_0,Q8_0"
    assert f"{GGUF} has no Q5_0 in the cache" in refusal(capsys, "rm", f"{GGUF}:Q5_0")[1]
    run(capsys, "rm", f"{GGUF}:Q8_0")
    assert run(capsys, "list").splitlines()[1].split()[0] == f"{GGUF}:Q4_0"


def test_wrong_models(hub, checkpoint, tmp_path, capsys):
    assert refusal(capsys, "pull", str(checkpoint)) == (
        2,
        f"error: {checkpoint} exists here already: give an id, ORG/NAME or ORG/NAME:QUANTIZATION\n",
    )
    assert "nowhere is neither a directory nor the id of a model" in refusal(capsys, "pull", "nowhere")[1]
    assert "nowhere is no id of a downloaded model" in refusal(capsys, "rm", "nowhere")[1]
    hub.add_folder(REPO, checkpoint)
    run(capsys, "pull", REPO)
    assert refusal(capsys, "rm", "org/tiny-lama")[1].endswith(f"not in the cache; did you mean {REPO}?\n")
    code, text = refusal(capsys, "serve", "org/none")
    assert code == 1 and text.startswith("error: org/none is neither a directory nor a model at http://127.0.0.1")


def test_commands_that_read_no_weights(hub, checkpoint, capsys):
    hub.add_folder(REPO, checkpoint)
    assert run(capsys, "plan", REPO, "--revision", "v1") == run(capsys, "plan", str(checkpoint))
    assert "config.json" in hub.got() and not [name for name in hub.got() if name.endswith(".safetensors")]


def test_calibrate_writes_beside_the_snapshot(hub, tmp_path, capsys):
    hub.add_folder(REPO, DEFAULT_MODEL)
    del hub.repos[REPO]["kv_statistics.safetensors"]
    text = tmp_path / "text.txt"
    text.write_text("words: d3,f9\n#>d+f=k\n" * 100)
    run(capsys, "calibrate", REPO, "--text", str(text), "--pieces", "1", "--length", "300")
    assert (EngineArgs(REPO).path / "kv_statistics.safetensors").is_file()


def test_a_server_has_the_id_as_name(hub, checkpoint):
    hub.add_folder(REPO, checkpoint)
    args = cli.make_parser().parse_args(["serve", REPO, "--revision", "v1"])
    engine_args, options = read_options(args)
    assert options.served_model_names == (REPO,)
    assert (engine_args.revision, engine_args.commit) == ("v1", hub.commit(REPO))


def test_the_variables_of_huggingface_hub(hub, checkpoint, tmp_path):
    """In a process of its own, as they are read when huggingface_hub is imported."""
    hub.add_folder(REPO, checkpoint)
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret"}

    def pull(**more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvllm", "pull", REPO]
        return subprocess.run(command, env=os.environ | variables | more, capture_output=True, text=True)

    offline = pull(HF_HUB_OFFLINE="1")
    assert offline.returncode == 1 and "HF_HUB_OFFLINE forbids to download it" in offline.stderr
    assert hub.requests == []
    first = pull()
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip().startswith(str(tmp_path / "home" / "hub" / "models--org--tiny-llama"))
    assert hub.tokens == {"Bearer hf_secret"}
    assert pull(HF_HUB_OFFLINE="1").stdout == first.stdout
