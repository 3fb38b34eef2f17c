"""Compression in models whose scores have a soft cap, a scale of their own or learned sinks, in the engine.

Attention adds them up, and so must what chooses survivors: logits, queries that are computed again, survivors and mass
are those of dense attention in float64.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import random_token_ids
from tests.helpers.families import FAMILIES, FULL
from tests.helpers.layout_recorder import assert_as_expected, compression_config, greedy, make_llm, run
from tests.helpers.transformers_decoder import TransformersDecoder

ALL_FULL = {"layer_types": [FULL] * 3}
MODELS = {
    "soft caps": FAMILIES["gemma2"] | ALL_FULL | {"attn_logit_softcapping": 2.0},
    "learned sinks": FAMILIES["gpt-oss"] | ALL_FULL,
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, **MODELS[request.param])
    return path


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> TransformersDecoder:
    return TransformersDecoder(checkpoint)


@pytest.mark.parametrize(
    ("method", "policy"),
    [
        pytest.param("kara", "periodic", marks=pytest.mark.long),
        ("mean_attention", "periodic"),
        pytest.param("snapkv", "threshold", marks=pytest.mark.long),
        ("h2o", "threshold"),
    ],
)
def test_all_is_that_of_dense_attention(
    checkpoint: Path, decoder: TransformersDecoder, method: str, policy: str
) -> None:
    llm, recorder = make_llm(checkpoint, compression_config(method, policy))
    run(llm, random_token_ids(24, 50), [greedy(60, 0), greedy(60, 1)])
    assert len(recorder.events) >= 4
    assert_as_expected(decoder, llm)
