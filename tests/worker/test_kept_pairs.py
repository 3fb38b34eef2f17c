"""What requests are told of the KV pairs that layers and heads keep, against accounts of executors of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.core.protocol import KeptPairs, StepResult, TransferReport
from kvllm.distributed.results import TransfersOfRanks, merge
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.engines import random_token_ids
from tests.helpers.layout_recorder import compression_config, greedy, make_llm, step
from tests.worker.test_layer_groups import LAYERS, METHODS, recorded

checkpoint = checkpoint_fixture("qwen3", head_dim=16, num_hidden_layers=LAYERS)


def told(reports: list[KeptPairs], shape: tuple[int, ...]) -> Tensor:
    """bool `[layers, kv_heads, positions]` after all reports."""
    left = torch.ones(shape, dtype=torch.bool)
    for each in reports:
        rows = np.array([[np.frombuffer(head, dtype=np.uint8) for head in heads] for heads in each.bits])
        bits = np.unpackbits(rows, axis=-1, bitorder="little")[..., : each.end - each.first]
        left[each.layers, :, each.first : each.end] = torch.from_numpy(bits.astype(bool))
    return left


def asked(number: int, **options: Any) -> SamplingParams:
    return structs.replace(greedy(90, number), report_kept_pairs=True, **options)


@pytest.mark.parametrize(
    ("method", "policy"), [("keydiff", "standalone"), ("adakv", "threshold"), ("mean_attention", "pressure")]
)
def test_reports_agree_with_the_cache(checkpoint: Path, method: str, policy: str) -> None:
    """Windows that overlap, heads that keep different numbers, and preemptions; after every step."""
    pool = {"num_gpu_blocks_override": 26} if policy == "pressure" else {}
    llm, recorder = make_llm(checkpoint, compression_config(method, policy), **pool)
    engine, compared = llm.llm_engine, 0
    for number, prompt in enumerate(random_token_ids(9, 40, 3)):
        engine.add_request(str(number), prompt, asked(number))
    silent = engine.add_request("silent", [5, 6], greedy(90, 3))
    while engine.has_unfinished_requests():
        step(llm)
        for request in engine.outputs.requests.values():
            seq = request.sequences[0]
            if (reports := list(seq.metrics.kept_pairs)) and (text := recorder.alive.get(seq.seq_id)):
                layout = text.layout
                expected = torch.zeros(*layout.shape[:2], text.length + 1, dtype=torch.bool)
                expected.scatter_(-1, layout.where(layout >= 0, text.length), True)
                assert torch.equal(told(reports, expected.shape)[..., :-1], expected[..., :-1])
                compared += 1
    assert compared > 50 and silent.metrics.windows_compressed and not silent.metrics.kept_pairs
    assert policy != "pressure" or llm.stats().preemptions > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_the_last_step_of_a_request_is_reported(checkpoint: Path, ahead: bool) -> None:
    """Also where the request was taken out of the batch while the step ran: its second compression is in the last."""
    compression = CompressionConfig(method="keydiff", policy="threshold", threshold_tokens=60, budget_tokens=40)
    llm = LLM(checkpoint, num_gpu_blocks_override=40, async_scheduling=ahead, compression=compression)
    params = structs.replace(asked(0), max_tokens=22)
    [output] = llm.generate(random_token_ids(62), params, use_tqdm=False)
    assert len(output.metrics.kept_pairs) == len(output.metrics.regions) == 2


@pytest.mark.parametrize("swap", ["never", "always"])
def test_reports_of_layers_with_shares_of_their_own(checkpoint: Path, swap: str) -> None:
    """Sequences are preempted, and lose their caches or get them back from the host."""
    host = {"swap": swap, "kv_offloading_size": 0.01} if swap == "always" else {}
    llm, recorder = recorded(checkpoint, compression=METHODS["keys alone"], num_gpu_blocks_override=12, **host)
    engine, compared = llm.llm_engine, 0
    for number, prompt in enumerate(random_token_ids(5, 50, 8, seed=1)):
        engine.add_request(str(number), prompt, asked(number, max_tokens=60))
    while engine.has_unfinished_requests():
        engine.step()
        for seq in engine.scheduler.running:
            if (reports := list(seq.metrics.kept_pairs)) and (text := recorder.alive.get(seq.seq_id)):
                expected = text.cached[torch.argsort(torch.tensor(recorder.layers))][..., : text.length]
                assert torch.equal(told(reports, expected.shape), expected)
                compared += 1
    stats = llm.stats()
    assert compared > 20 and stats.preemptions > 0 and (stats.swapped_in > 0) == (swap == "always")


def test_ranks_report_their_own_heads() -> None:
    results = [StepResult(kept_pairs=[KeptPairs(3, 8, 16, [0, 1], [[head], [head]])]) for head in (b"a", b"b")]
    (found,) = merge(results, TransfersOfRanks()).kept_pairs
    assert found == KeptPairs(3, 8, 16, [0, 1], [[b"a", b"b"], [b"a", b"b"]])
    assert results[0].transfers == TransferReport()
