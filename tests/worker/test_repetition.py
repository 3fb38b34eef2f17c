"""The pass over a repeated text, and the scores of KVzip, against dense attention over the text given twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvllm.compression import mass
from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax
from kvllm.worker import repetition
from kvllm.worker.repetition import attention, attention_received, pieces
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.dense_decoder import DenseDecoder, attend, attention_probabilities
from tests.helpers.engines import random_token_ids
from tests.helpers.layout_recorder import assert_as_expected, compression_config, greedy, make_llm, run

checkpoint = checkpoint_fixture("qwen3", head_dim=16)


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> DenseDecoder:
    return DenseDecoder(checkpoint)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("PIECE", 16), ("LEAD", 3), ("LEAST_PIECE", 7)):
        monkeypatch.setattr(repetition, name, value)
    yield


def test_a_prompt_is_scored_as_a_text_that_stands_twice(checkpoint: Path, decoder: DenseDecoder) -> None:
    """KVzip's definition, literally: the columns of the first copy, the rows of the second one, their maximum."""
    llm, recorder = make_llm(checkpoint, compression_config("kvzip", "threshold"))
    received = list[Tensor]()
    select = recorder.runner.compressor.selector.select
    recorder.runner.compressor.selector.select = lambda *args, **options: (
        received.append(options["received"]) or select(*args, **options)
    )
    (prompt,) = random_token_ids(60)
    run(llm, [prompt], [greedy(2)])
    causal = torch.ones(120, 120, dtype=torch.bool).tril().expand(3, 2, -1, -1)
    dense = decoder.forward(prompt + prompt, causal)
    (found,) = received  # of all layers
    for layer, of_layer in enumerate(found):
        of_tokens = attention_probabilities(dense.queries[layer], dense.keys[layer], causal[layer], PLAIN_SOFTMAX)
        expected = of_tokens[:, :, 60:, :60].amax((1, 2))
        torch.testing.assert_close(of_layer.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("policy", "options"),
    [("threshold", {}), ("periodic", {"compress_prompt": True})],
)
def test_long_texts_are_repeated_in_pieces(
    checkpoint: Path, decoder: DenseDecoder, small_pieces: None, policy: str, options: dict[str, Any]
) -> None:
    """Prompts and output, whole caches that were cut before, and texts after which few positions are left."""
    llm, recorder = make_llm(checkpoint, compression_config("kvzip", policy, **options))
    run(llm, random_token_ids(50, 17, 160), [greedy(60, 0), greedy(90, 1), greedy(30, 2)])
    assert len(recorder.events) >= 8
    assert_as_expected(decoder, llm)


def test_pieces_begin_with_the_end_of_the_piece_before(small_pieces: None) -> None:
    assert list(pieces(5, 40, room=100)) == [(5, 21), (18, 37), (34, 40)]
    assert list(pieces(0, 20, room=13)) == [(0, 10), (7, 20)]  # 3 and 10 tokens fit after the text
    assert list(pieces(0, 15, room=4)) == [(0, 7), (4, 14), (11, 15)]
    assert list(pieces(3, 9, room=100)) == [(3, 9)]


SOFTMAXES = [PLAIN_SOFTMAX, Softmax(0.3, 1.5, torch.linspace(-2, 3, 4))]


@pytest.mark.parametrize("tile_bytes", [None, 700])
@pytest.mark.parametrize("softmax", SOFTMAXES, ids=["plain", "capped"])
def test_attention_of_repeated_tokens(
    softmax: Softmax, tile_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To all that is cached, and to repeated tokens up to their own; whole and in tiles of few tokens."""
    if tile_bytes is not None:
        monkeypatch.setattr(mass, "_CPU_TILE_BYTES", tile_bytes)
    generator = torch.Generator().manual_seed(0)
    queries, keys, values, repeated_keys, repeated_values = (
        torch.randn(heads, count, 8, generator=generator) * 2
        for heads, count in ((4, 11), (2, 30), (2, 30), (2, 11), (2, 11))
    )
    both_keys, both_values = torch.cat((keys, repeated_keys), dim=1), torch.cat((values, repeated_values), dim=1)
    visible = torch.tensor([[j < 30 or j - 30 <= i for j in range(41)] for i in range(11)]).expand(2, -1, -1)
    dense = [each.double() for each in (queries, both_keys, both_values)]
    expected = attention_probabilities(*dense[:2], visible, softmax)[..., :30].amax((1, 2))
    found = attention_received(queries, keys, repeated_keys, softmax)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    attended = attention(queries, (keys, values), (repeated_keys, repeated_values), softmax)
    torch.testing.assert_close(attended.double(), attend(*dense, visible, softmax), rtol=1e-5, atol=1e-6)
