"""`kvllm calibrate`: the files it writes, what is refused before the work, and going on after an interrupt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.reasoner import calibrate
from kvllm import ConfigError
from kvllm.calibration import files
from kvllm.calibration.files import PARTIAL_FILE
from kvllm.calibration.layer_losses import SHARES, Reading
from kvllm.comparison.texts import Text
from kvllm.compression.specs import STATISTICS_FILE
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.entrypoints import cli
from kvllm.layer_shares import LAYER_LOSSES_FILE, read_losses
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.tokenizers import byte_level

LENGTH = 400


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tokenizer = byte_level("plain").hf
    make_checkpoint(tmp_path, "qwen3", vocab_size=len(tokenizer), head_dim=16, num_hidden_layers=2)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def run(*options: str) -> None:
    cli.main(["calibrate", "--pieces", "2", "--length", str(LENGTH), *options])


def test_files_are_written_beside_the_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    run(str(checkpoint))
    assert f"Written: {checkpoint / STATISTICS_FILE}, from 800 tokens" in capsys.readouterr().out
    assert not (checkpoint / LAYER_LOSSES_FILE).exists()
    run(str(checkpoint), "--layer-losses")
    assert f"Written: {checkpoint / LAYER_LOSSES_FILE}, from 800 tokens" in capsys.readouterr().out
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(checkpoint / STATISTICS_FILE).items()}
    assert shapes == {"mean": (2, 8, 16), "magnitude": (2, 8, 8), "covariance": (2, 8, 16, 16)}
    losses = read_losses(checkpoint, 2)
    assert (losses.shares, losses.text, losses.tokens) == (list(SHARES), "prose, code", 2 * LENGTH)
    assert all(of_layer[0] > of_layer[1] > of_layer[-1] == 0 for of_layer in losses.losses)


def test_an_interrupted_command_goes_on(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(str(checkpoint), "--layer-losses")
    whole = (checkpoint / LAYER_LOSSES_FILE).read_bytes()
    measure, calls = Reading.losses, []

    def interrupted(self: Any, layer: int) -> list[float]:
        calls.append(layer)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(self, layer)

    monkeypatch.setattr(Reading, "losses", interrupted)
    (checkpoint / LAYER_LOSSES_FILE).unlink()
    with pytest.raises(SystemExit) as stopped:
        run(str(checkpoint), "--layer-losses")
    assert stopped.value.code == 130 and (checkpoint / PARTIAL_FILE).exists()
    run(str(checkpoint), "--layer-losses")
    assert calls == [0, 1, 0, 1, 1]
    assert (checkpoint / LAYER_LOSSES_FILE).read_bytes() == whole and not (checkpoint / PARTIAL_FILE).exists()


def test_what_is_of_other_settings_does_not_count(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(str(checkpoint), "--layer-losses")
    whole = (checkpoint / LAYER_LOSSES_FILE).read_bytes()
    (checkpoint / PARTIAL_FILE).write_text('{"settings": "others", "sums": [[[9, 9, 9, 9, 9]]]}')
    run(str(checkpoint), "--layer-losses")
    assert (checkpoint / LAYER_LOSSES_FILE).read_bytes() == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--text", "SHORT"], "--length=400 is not allowed: at most"),
        (["--length", "4"], "--length=4 is not allowed: more than 4"),
        (["--length", "384", "--layer-losses"], "--length=384 is not allowed: more than 384"),
        (["--length", "9999"], "max_position_embeddings=512"),
        (["--pieces", "0"], "--pieces=0 is not allowed: at least one for each text"),
    ],
)
def test_bad_input(options: list[str], message: str, checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    (checkpoint / "short").write_text("a few words")
    given = [str(checkpoint / "short") if option == "SHORT" else option for option in options]
    with pytest.raises(SystemExit) as stopped:
        run(str(checkpoint), *given)
    assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert not (checkpoint / STATISTICS_FILE).exists()


def test_the_model_of_the_package_is_not_meant_by_default(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run()
    assert "MODEL=None is not allowed: the directory of a checkpoint" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_known_before_the_work() -> None:
    with pytest.raises(ConfigError, match="--model='/proc'.* a folder in which a file can be written"):
        files.calibrate(Path("/proc"), [Text("", [], [3] * LENGTH)], "text")


@pytest.mark.long
def test_problems_of_the_reasoner(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for file in Path(DEFAULT_MODEL).iterdir():
        if not file.name.startswith("kv_"):
            (tmp_path / file.name).symlink_to(file)
    arguments = ["--model", str(tmp_path), "--task", "program", "--pieces", "2", "--layer-losses"]
    calibrate.run_calibration(arguments)
    assert f"Written: {tmp_path / LAYER_LOSSES_FILE}" in capsys.readouterr().out
    losses = read_losses(tmp_path, 4)
    assert losses.text == "problems of the reasoner: program"
    assert all(of_layer[0] > of_layer[-1] == 0 for of_layer in losses.losses)
