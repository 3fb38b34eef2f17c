"""What one compressed layer costs the predictions, against an engine in which that layer alone compresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import layer_losses
from benchmarks.common.layer_losses import SHARES
from benchmarks.common.texts import Text
from benchmarks.quality import calibrate
from kvllm import LLM, CompressionConfig, ConfigError, SamplingParams
from kvllm.comparison.teacher_forcing import TeacherForcing
from kvllm.config import LayerGroup
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.layer_shares import LAYER_LOSSES_FILE, read_losses
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressions import paper_compression

WINDOW, BUFFER, PROMPT = 28, 8, 7
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layer_losses")
    make_checkpoint(path, "qwen3", head_dim=16)
    return path


def random_texts(lengths: list[int]) -> list[Text]:
    generator = torch.Generator().manual_seed(5)
    return [Text(torch.randint(3, 60, (length,), generator=generator).tolist(), PROMPT) for length in lengths]


def predictions(path: Path, text: Text, compression: CompressionConfig | None) -> torch.Tensor:
    """Logits of the engine at each token of the text behind its prompt, and at the prompt's last."""
    logits: list[torch.Tensor] = []
    llm = LLM(
        path,
        dtype="float32",
        block_size=1,
        max_model_len=128,
        num_gpu_blocks_override=512,
        max_num_seqs=1,
        compression=compression,
    )
    output = text.token_ids[text.num_prompt :]
    params = SamplingParams(temperature=0, max_tokens=len(output) + 1, ignore_eos=True)
    prompt = text.token_ids[: text.num_prompt]
    TeacherForcing(llm).feed([prompt], [output], [params], lambda rows, *_: logits.append(rows))
    return torch.cat(logits)


def of_one_layer(layer: int, share: float) -> CompressionConfig:
    others = tuple(other for other in range(NUM_LAYERS) if other != layer)
    kept = BUFFER + round(share * (WINDOW - BUFFER))
    options: dict[str, Any] = {"chunk_budget": 0, "policy": "standalone", "window_blocks": WINDOW, "buffer": BUFFER}
    groups = (LayerGroup((layer,), kept), LayerGroup(others, WINDOW))
    return paper_compression(method="kara_sharp", layer_groups=groups, **options)


def test_losses_are_those_of_an_engine(checkpoint: Path) -> None:
    """Two texts of three and two windows; the second one ends when its last window is full."""
    found = random_texts([80, PROMPT + WINDOW + WINDOW - BUFFER + 1])
    measured = torch.tensor(layer_losses.measure(checkpoint, found, WINDOW, BUFFER))
    assert measured.shape == (NUM_LAYERS, len(SHARES)) and (measured[:, -1] == 0).all()
    behind = slice(WINDOW + 1, None)  # the first row is the prompt's last token
    full = [predictions(checkpoint, text, None)[behind].double().log_softmax(-1) for text in found]
    for layer in range(NUM_LAYERS):
        for i, share in enumerate(SHARES[:-1]):
            total, tokens = 0.0, 0
            for text, whole in zip(found, full, strict=True):
                compressed = predictions(checkpoint, text, of_one_layer(layer, share))[behind].double().log_softmax(-1)
                total += (whole.exp() * (whole - compressed)).sum().item()
                tokens += len(whole)
            assert total > 0
            assert measured[layer, i].item() == pytest.approx(total / tokens, rel=2e-3)


def test_the_script_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for file in Path(DEFAULT_MODEL).iterdir():
        if file.name not in ("kv_statistics.safetensors", LAYER_LOSSES_FILE):
            (tmp_path / file.name).symlink_to(file)
    arguments = ["--model", str(tmp_path), "--task", "program", "--length", "480", "--pieces", "2", "--layer-losses"]
    sizes = ["--window", "64", "--buffer", "16"]
    with pytest.raises(ConfigError, match="--window=384 is not allowed: less than the tokens .* more than 384"):
        calibrate.run_calibration(arguments)
    assert LAYER_LOSSES_FILE not in capsys.readouterr().out
    calibrate.run_calibration([*arguments, *sizes])
    assert str(tmp_path / LAYER_LOSSES_FILE) in capsys.readouterr().out
    losses = read_losses(tmp_path, 4)
    assert losses.shares == list(SHARES) and losses.tokens == 960
    assert json.loads((tmp_path / LAYER_LOSSES_FILE).read_text())["text"] == losses.text
    assert all(of_layer[0] > of_layer[-1] == 0 for of_layer in losses.losses)
