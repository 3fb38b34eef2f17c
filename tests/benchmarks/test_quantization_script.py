"""The script about weights of few bits, against the loss that transformers computes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.quality.quantization import run_quantization
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.errors import ConfigError
from kvllm.tokenizer import load_tokenizer

LENGTH = 40


def test_perplexity_is_that_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Digits and signs in a random order, which the model does not expect: its weights matter at every position."""
    text = "".join(random.Random(0).choices("0123456789+-=,", k=2 * LENGTH))
    (tmp_path / "text").write_text(text)
    token_ids = load_tokenizer(DEFAULT_MODEL).encode(text)[: 2 * LENGTH]
    model = transformers.AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)
    pieces = torch.tensor(token_ids).view(2, LENGTH)
    loss = float(model(input_ids=pieces, labels=pieces).loss)

    arguments = ["--text", str(tmp_path / "text"), "--length", str(LENGTH), "--dtype", "float32"]
    run_quantization([*arguments, "--output", str(tmp_path)])
    written = json.loads((tmp_path / "quantization.json").read_text())
    full, int8, int4 = written["weights"].values()
    assert written["positions"] == 2 * (LENGTH - 1)
    assert full["perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    assert full["agreement"] == 1 and full["divergence"] == 0
    assert 0 < int8["divergence"] < int4["divergence"] and int8["agreement"] >= int4["agreement"]
    assert "int4" in capsys.readouterr().out


def test_text_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("1+2")
    with pytest.raises(ConfigError, match="at most the file's"):
        run_quantization(["--text", str(tmp_path / "text")])
