"""Groups of layers that keep different shares of what is compressed, in an engine.

Between steps all memory that no table reaches any more is NaN, so a result that reads a released slot shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, CompressionConfig, ConfigError, SamplingParams
from kvllm.config import LayerGroup
from kvllm.kvcache.groups import KVGroup
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import paper_compression
from tests.helpers.dense_decoder import DenseDecoder
from tests.helpers.engines import make_llm, random_token_ids
from tests.helpers.recorder import Recorder, assert_dense
from tests.worker.test_kv_groups import run_poisoned

LAYERS = 5
GROUPS = [LayerGroup((0, 2, 3), 1), LayerGroup((1,), 2), LayerGroup((4,), 3)]
"""Of windows of three blocks, the last layer keeps all."""
OPTIONS: dict[str, Any] = {
    "block_size": 8,
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "watermark": 0.0,
}


checkpoint = checkpoint_fixture("qwen3", head_dim=16, num_hidden_layers=LAYERS)


def compression(method: str, **options: Any) -> CompressionConfig:
    return paper_compression(method=method, window_blocks=3, layer_groups=GROUPS, buffer=4, **options)


def recorded(checkpoint: Path, **options: Any) -> tuple[LLM, Recorder]:
    llm = make_llm(checkpoint, **(OPTIONS | options))
    recorder = Recorder(llm.llm_engine.executor.runner, llm.config)
    llm.llm_engine.executor = recorder
    return llm, recorder


METHODS = {
    "observed": compression("mean_attention", period=4),
    "recomputed": compression("kara", chunk_budget=2, period=4),
    "keys alone": compression("keydiff", policy="pressure", period=4),
    "prompts": compression("keydiff", compress_prompt=True, period=4),
    "repeated": compression("kvzip", compress_prompt=True, period=4),
}


LONG = ("recomputed", "repeated")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in METHODS]
)
def test_layers_attend_what_their_group_keeps(checkpoint: Path, name: str) -> None:
    """Against dense attention over what survived in each layer: prompts in chunks, completions that share blocks, a
    common beginning, and a pool that is too small."""
    llm, recorder = recorded(checkpoint, compression=METHODS[name], num_gpu_blocks_override=12)
    common = random_token_ids(34)[0]
    prompts = [*random_token_ids(5, 50, seed=1), *([*common, number] for number in (5, 6))]
    run_poisoned(llm, prompts, SamplingParams(n=2, seed=3, max_tokens=60, ignore_eos=True))
    assert llm.stats().windows_compressed >= 10 and llm.stats().preemptions > 0
    assert len(dropped_by_layer(checkpoint, recorder)) > 2


def dropped_by_layer(checkpoint: Path, recorder: Recorder) -> set[tuple[int, ...]]:
    """What the layers of each text had dropped at last, each its group's share; after checking that all logits are
    those of dense attention over what each layer held."""
    decoder = DenseDecoder(checkpoint)
    held = set[tuple[int, ...]]()
    for text in filter(lambda text: text.logits, recorder.texts):
        text.visible = text.visible[torch.argsort(torch.tensor(recorder.layers))]
        assert_dense(decoder, text)
        kept = text.cached[:, 0].sum(-1)
        held.add(tuple((text.length - kept)[torch.argsort(torch.tensor(recorder.layers))].tolist()))
    assert all(dropped == (2 * one, one, 2 * one, 2 * one, 0) for dropped in held for one in [dropped[1]])
    return held


def test_blocks_saved_are_real(checkpoint: Path) -> None:
    """A window of three blocks gives back two in three layers and one in another, of the fifteen that it took."""
    llm = make_llm(checkpoint, **OPTIONS, compression=METHODS["keys alone"], num_gpu_blocks_override=12)
    engine = llm.llm_engine
    assert llm.config.kv_groups == (
        KVGroup(None, ((0,),), 1),
        KVGroup(None, ((2,), (3,)), 1),
        KVGroup(None, ((1,),), 2),
        KVGroup(None, ((4,),), 3),
    )
    engine.add_request("0", random_token_ids(6)[0], SamplingParams(max_tokens=120, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        stats = llm.stats()
        windows = stats.windows_compressed
        assert stats.blocks_released == windows * (3 * 2 + 1)
        assert windows * (3 * 16 + 8) // 5 - windows <= stats.entries_evicted <= windows * (3 * 16 + 8) // 5
        for seq in engine.scheduler.running:
            assert stats.blocks_in_use == LAYERS * -(-seq.logical_length // 8) - stats.blocks_released
    assert stats.windows_compressed >= 2


def test_the_falling_line_of_pyramidkv_gives_blocks_back(checkpoint: Path) -> None:
    """SnapKV's scores by windows, of which layers keep PyramidKV's budgets in blocks: two in the mean."""
    falling = paper_compression(
        method="snapkv", query_window=4, window_blocks=3, retain_blocks=2, layer_groups="pyramid", buffer=4, period=4
    )
    llm, recorder = recorded(checkpoint, compression=falling)
    assert llm.config.compression.retained_by_layer([None] * LAYERS) == [3, 2, 2, 2, 1]
    run_poisoned(llm, random_token_ids(5, 50, seed=1), SamplingParams(max_tokens=60, ignore_eos=True))
    stats = llm.stats()
    assert stats.windows_compressed >= 3 and stats.blocks_released == stats.windows_compressed * LAYERS
    decoder = DenseDecoder(checkpoint)
    for text in recorder.texts:
        text.visible = text.visible[torch.argsort(torch.tensor(recorder.layers))]
        assert_dense(decoder, text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_groups": [LayerGroup((0, 1, 2), 1)]}, r"layers \[3, 4\] are in no group: add them"),
        ({"layer_groups": [LayerGroup((0, 1, 2, 3, 4, 5), 1)]}, "the model has layers 0 to 4"),
        ({"layer_groups": [LayerGroup((0, 0), 1)]}, "layers=0 is not allowed: each layer once"),
        ({"layer_groups": [LayerGroup((-1,), 1)]}, "layers=-1 is not allowed: indices of layers, from 0"),
        ({"layer_groups": [LayerGroup((), 1)]}, "at least one layer"),
        ({"layer_groups": [LayerGroup((0,), 4)]}, "retain_blocks=4 is not allowed: between 1 and window_blocks=3"),
        ({"layer_groups": [{"layers": [0], "retained": 4}]}, "layer_groups=.*missing required field `retain_blocks`"),
        ({"layer_groups": GROUPS, "retain_tokens": 9}, "retain_tokens=9 is not allowed: not beside layer_groups"),
        ({"layer_groups": GROUPS, "method": "h2o"}, "method='h2o' is not allowed: not beside layer_groups"),
    ],
)
def test_what_cannot_be_is_refused(checkpoint: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """Before weights are read: a folder that has none says the same."""
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=message):
        make_llm(tmp_path, compression=paper_compression(**{"method": "keydiff", "buffer": 4} | options))
