"""Workloads for the scheduler, and a digest of all plans that it makes for one."""

from __future__ import annotations

import hashlib
import random
from itertools import chain

from kvllm.config import CompressionConfig, EngineConfig
from kvllm.core.protocol import StepPlan, encode
from tests.helpers.compressions import paper_compression
from tests.helpers.plans import scheduled_in

COMPRESSIONS: dict[str, CompressionConfig | None] = {
    "none": None,
    "periodic": paper_compression(method="kara", period=4, max_sequences=2, window_blocks=2, buffer=1),
    "prompts": paper_compression(
        method="kara", period=6, max_sequences=30, window_blocks=3, buffer=2, compress_prompt=True
    ),
    "pressure": CompressionConfig(
        method="kara", policy="pressure", period=5, max_sequences=3, window_blocks=2, buffer=1
    ),
    "threshold": CompressionConfig(
        method="keydiff", policy="threshold", threshold_tokens=30, budget_tokens=17, buffer=2
    ),
}


def random_config(rng: random.Random, compression: CompressionConfig | None) -> EngineConfig:
    max_num_seqs = rng.randint(2, 8)
    return EngineConfig(
        num_blocks=rng.randint(20, 48),
        block_size=4,
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max_num_seqs, 40),
        enable_prefix_caching=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.01, 0.2]),
        compression=compression,
    )


def plan_digest(harness_type, name: str, seed: int) -> str:
    """Digest of the plans for 60 requests that arrive while others run, a few of which are aborted.

    harness_type: Harness of `tests/core/test_scheduler.py`.
    """
    rng = random.Random(f"{name} {seed}")
    harness = harness_type(random_config(rng, COMPRESSIONS[name]))
    most = min(harness.config.num_blocks * 4 - 30, 60)
    for _ in range(60):
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 24))]
        harness.add(prompt, rng.randint(1, most), rng.choice([1, 1, 1, 2]))
        if rng.random() < 0.1:
            harness.finish(rng.choice(sorted(harness.live)))
        if rng.random() < 0.02:
            harness.fail(executed=rng.random() < 0.5)
        for _ in range(rng.choice([0, 0, 1, 8])):
            if harness.scheduler.has_unfinished:
                harness.step()
    harness.run()
    digest = hashlib.sha256()
    for plan in harness.plans:
        digest.update(encode(_decisions(plan)))
    return f"{digest.hexdigest()[:16]} {len(harness.plans)} {harness.scheduler.stats.preemptions}"


def _decisions(plan: StepPlan) -> list:
    """What the scheduler chose: sequences, lengths and blocks. All layers attend all tokens."""
    started = {start.seq_id: start.tables[0].blocks for start in plan.new_seqs}
    jobs = [(job.seq_id, job.parts[0]) for job in plan.compressions]
    return [
        plan.reset,
        plan.dropped_seq_ids,
        [(start.seq_id, start.token_ids, start.prompt_length, start.logical_length) for start in plan.new_seqs],
        [
            (seq_id, job.first_block, job.num_windows, job.size, job.retain, job.region_blocks, job.destinations)
            for seq_id, job in jobs
        ],
        [(copy.seq_id, copy.index, copy.destination) for copy in plan.copies],
        [
            (
                item.seq_id,
                item.num_tokens,
                [*started.get(item.seq_id, []), *chain(*item.new_blocks)],
                item.samples,
                [fork.seq_id for fork in item.forks],
            )
            for item in sorted(scheduled_in(plan))  # by id: which ones, and not where in the batch
        ],
    ]
