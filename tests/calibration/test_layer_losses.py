"""What one compressed layer costs the predictions, against an engine in which that layer alone compresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.calibration.dense import DenseModel
from kvllm.calibration.layer_losses import SHARES, Sums, Windows, losses, measure
from kvllm.comparison.teacher_forcing import TeacherForcing
from kvllm.comparison.texts import Text
from kvllm.config import LayerGroup
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import paper_compression

WINDOW, BUFFER, PROMPT = 28, 8, 7
WINDOWS = Windows(WINDOW, BUFFER)
NUM_LAYERS = 3


checkpoint = checkpoint_fixture("qwen3", head_dim=16)


def random_texts(lengths: list[int]) -> list[Text]:
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(3, 60, (length,), generator=generator).tolist() for length in lengths]
    return [Text("", each[:PROMPT], each[PROMPT:]) for each in tokens]


def predictions(path: Path, text: Text, compression: CompressionConfig | None) -> torch.Tensor:
    """Logits of the engine at each token of the text after its prompt, and at the prompt's last."""
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
    params = SamplingParams(temperature=0, max_tokens=len(text.output) + 1, ignore_eos=True)
    TeacherForcing(llm).feed([text.prompt], [text.output], [params], lambda rows, *_: logits.append(rows))
    return torch.cat(logits)


def of_one_layer(layer: int, share: float) -> CompressionConfig:
    others = tuple(other for other in range(NUM_LAYERS) if other != layer)
    kept = BUFFER + round(share * (WINDOW - BUFFER))
    options: dict[str, Any] = {"chunk_budget": 0, "policy": "standalone", "window_blocks": WINDOW, "buffer": BUFFER}
    groups = (LayerGroup((layer,), kept), LayerGroup(others, WINDOW))
    return paper_compression(method="kara_no_bi", layer_groups=groups, **options)


def test_losses_are_those_of_an_engine(checkpoint: Path) -> None:
    """Two texts of three and two windows; the second one ends when its last window is full."""
    found = random_texts([80, PROMPT + WINDOW + WINDOW - BUFFER + 1])
    sums: Sums = []
    measure(DenseModel(checkpoint, 80), found, WINDOWS, sums, lambda: None)
    measured = torch.tensor(losses(found, WINDOWS, sums))
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
