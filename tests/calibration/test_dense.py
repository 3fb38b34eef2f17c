"""A text that is read at once, and read again in part, against transformers in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvllm.calibration.dense import DenseModel
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.families import FAMILIES
from tests.helpers.paged_model import tokens
from tests.helpers.transformers_decoder import TransformersDecoder

LENGTH, BEGIN = 30, 12


@pytest.mark.parametrize(
    "name", ["llama-biases", "qwen3-named-windows", "gemma2", "gemma3", "gpt-oss", "olmo2", "granite", "cohere2"]
)
@torch.no_grad()
def test_predictions_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """As it is, and with tokens that the last ones do not attend to in one layer."""
    make_checkpoint(tmp_path, **FAMILIES[name])
    model, decoder, token_ids = DenseModel(tmp_path, LENGTH), TransformersDecoder(tmp_path), tokens(LENGTH)
    visible = torch.stack([model.visible(layer, 0, LENGTH) for layer in range(len(model.layers))])
    runs, hidden = model.read(token_ids)
    close = {"rtol": 1e-3, "atol": 1e-3}
    whole = decoder.forward(token_ids, visible).logits.log_softmax(-1)
    torch.testing.assert_close(model.log_probabilities(hidden), whole.float(), **close)
    for layer in range(len(model.layers)):
        less = visible.clone()
        less[layer, 1, BEGIN:, 6:11] = False
        expected = decoder.forward(token_ids, less).logits[BEGIN:].log_softmax(-1)
        hidden = model.read_again(runs, BEGIN, layer, less[layer, :, BEGIN:])
        torch.testing.assert_close(model.log_probabilities(hidden), expected.float(), **close)
        assert (expected - whole[BEGIN:]).abs().max() > 0.01
