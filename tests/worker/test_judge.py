"""Divergences of compressions in the engine, against dense attention in float64 over what the caches held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from kvllm import LLM
from kvllm.core.protocol import StepPlan, StepResult
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressions import paper_compression
from tests.helpers.dense_decoder import DenseDecoder
from tests.helpers.engines import greedy, make_llm, random_prompts, random_token_ids, tokens
from tests.helpers.layout_recorder import (
    MAX_MODEL_LEN,
    Recorder,
    Text,
    completions,
    compression_config,
    positions_of,
    run,
)
from tests.helpers.plans import Scheduled, scheduled_in

BUFFER = 6
KARA = paper_compression(method="kara", period=8, window_blocks=3, retain_blocks=1, buffer=BUFFER, chunk_budget=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(path, "qwen3", head_dim=16)
    return path


class JudgeRecorder(Recorder):
    """Keeps for each judged compression: the text, its length, what was cached before and after, the divergence."""

    judged: list[tuple[Text, int, torch.Tensor, torch.Tensor, float]]

    def execute(self, plan: StepPlan) -> StepResult:
        jobs = [job for job in plan.compressions if job.judged]
        before = {job.seq_id: positions_of(self.alive[job.seq_id].layout, MAX_MODEL_LEN) for job in jobs}
        result = super().execute(plan)
        for job, divergence in zip(jobs, result.divergences, strict=True):
            text = self.alive[job.seq_id]
            [item] = [item for item in scheduled_in(plan) if item.seq_id == job.seq_id]
            after = positions_of(text.layout, MAX_MODEL_LEN)
            self.judged.append((text, text.length - item.num_tokens, before[job.seq_id], after, divergence))
        return result

    def _account(self, scheduled: list[Scheduled]) -> None:
        sampled = sum(item.samples + len(item.forks) for item in scheduled)
        self._logits = self._logits[len(self._logits) - sampled :]  # behind those of the judge
        super()._account(scheduled)


def divergence(decoder: DenseDecoder, text: Text, length: int, before: torch.Tensor, after: torch.Tensor) -> float:
    """Mean KL(before || after) over the last BUFFER tokens."""
    whole = decoder.forward(text.tokens[: text.length], text.visible[..., : text.length, : text.length])
    positions = list(range(length - BUFFER, length))
    causal = torch.ones(text.length, text.length, dtype=torch.bool).tril()[positions]
    log_probs = []
    for cached in (before, after):
        visible = cached[:, :, None, : text.length] & causal
        log_probs.append(decoder.recompute(whole, text.tokens, positions, visible).logits.log_softmax(-1))
    full, compressed = log_probs
    return float((full.exp() * (full - compressed)).sum(-1).mean())


@pytest.mark.parametrize(
    ("method", "policy", "options"),
    [
        ("kara", "periodic", {}),
        ("kara_sharp", "periodic", {}),
        ("h2o", "periodic", {"retain_tokens": 13}),
        ("sliding_window", "periodic", {"retain_tokens": 8}),
        ("keydiff", "pressure", {}),
        ("kara", "standalone", {"window_blocks": 30}),
        ("kara", "periodic", {"compress_prompt": True}),
    ],
)
def test_divergences_are_those_of_dense_attention(
    checkpoint: Path, method: str, policy: str, options: dict[str, Any]
) -> None:
    """In windows that keep whole blocks or odd numbers, in place or elsewhere, once or several in one job."""
    sizes = {"window_blocks": 4, "buffer": BUFFER, "guard_kl": 1e-5, "guard_every": 2} | options
    config = compression_config(method, policy, **({"retain_tokens": 10} | sizes))
    by_policy = {"standalone": {"block_size": 1, "num_gpu_blocks_override": 1000}}
    pool = {"block_size": 8, "num_gpu_blocks_override": 36 if policy == "pressure" else 120}
    settings = pool | by_policy.get(policy, {})
    llm = LLM(
        checkpoint,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        compression=config,
        **settings,
    )
    recorder = JudgeRecorder(llm)
    recorder.judged = []
    llm.llm_engine.executor = recorder
    run(llm, random_token_ids(24, 50, 3), [greedy(100), greedy(100), completions(2, 90)])
    decoder = DenseDecoder(checkpoint)
    assert len(recorder.judged) == llm.stats().compressions_judged >= 2
    for text, length, before, after, found in recorder.judged:
        expected = divergence(decoder, text, length, before, after)
        assert expected > 1e-6
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert llm.stats().added_blocks > 0
    assert len({event.retain for event in recorder.events}) > 1


def test_judging_changes_no_token_as_long_as_retention_stays(checkpoint: Path) -> None:
    """Nothing is stored, scored or observed by it, whatever the method keeps beside the cache."""
    prompts = random_prompts(256, (21, 40, 3))
    for method in ("kara", "kara_sharp", "h2o"):
        config = structs.replace(KARA, method=method, guard_kl=1e6, guard_every=1)
        llm, blind = make_llm(checkpoint, compression=config), make_llm(checkpoint, compression=config)
        outputs = llm.generate(prompts, greedy(120), use_tqdm=False)
        blind.llm_engine.executor.runner.judge = None  # plans the same, and reads nothing
        expected = tokens(blind, prompts, greedy(120))
        assert [output.outputs[0].token_ids for output in outputs] == expected
        divergences = [value for output in outputs for value in output.metrics.divergences]
        assert len(divergences) == llm.stats().compressions_judged > 3
        assert sum(divergences) == pytest.approx(llm.stats().divergence_sum)
        assert llm.stats().judge_seconds > 0


def test_sequences_are_read_in_passes_that_fit(checkpoint: Path) -> None:
    """Many windows in one step, and a budget of tokens for two of them."""
    config = structs.replace(KARA, guard_kl=0.001, guard_every=1)
    prompts = [{"prompt_token_ids": ids} for ids in random_token_ids(*range(20, 26))]
    divergences = []
    for budget in (512, 2 * BUFFER + 1):
        llm = make_llm(checkpoint, compression=config)
        llm.llm_engine.executor.runner.judge.sequences_per_pass = max(1, budget // BUFFER)
        divergences.append([o.metrics.divergences for o in llm.generate(prompts, greedy(100), use_tqdm=False)])
    assert divergences[0] == divergences[1] and all(len(each) >= 1 for each in divergences[0])


def test_equal_requests_give_equal_plans(checkpoint: Path) -> None:
    config = structs.replace(KARA, guard_kl=0.001, guard_every=2)

    def run() -> tuple[list[list[int]], Any]:
        llm: LLM = make_llm(checkpoint, compression=config)
        found = tokens(llm, random_prompts(256, (21, 40, 3)), greedy(120))
        return found, (llm.stats().entries_evicted, llm.stats().divergence_sum, llm.stats().added_blocks)

    assert run() == run()
