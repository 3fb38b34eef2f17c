"""A quiet tenant beside a busy one, in the real engine with the model of the package."""

from __future__ import annotations

import pytest

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.engine_args import DEFAULT_MODEL
from tests.helpers.engines import greedy, make_llm

OPTIONS = {
    "slots are short": {"num_gpu_blocks_override": 400, "max_num_seqs": 8},
    "blocks are short": {"num_gpu_blocks_override": 60, "max_num_seqs": 32},
    "blocks are short, compressed": {
        "num_gpu_blocks_override": 60,
        "max_num_seqs": 32,
        "compression": CompressionConfig(method="kara", policy="pressure", window_blocks=3, retain_blocks=1, buffer=8),
    },
}
QUIET = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def run(llm: LLM, noisy: str, quiet: str) -> tuple[list[int], int, int]:
    """80 long requests, and beside them short ones, at fixed steps. -> steps to the first token of each short request,
    steps in all, tokens in all."""
    engine = llm.llm_engine
    for i in range(80):
        engine.add_request(f"noisy {i}", {"prompt_token_ids": [5 + i] * 30}, greedy(40), tenant=noisy)
    first: list[int] = []
    waiting = {}
    before, steps = llm.stats().output_tokens, 0
    while engine.has_unfinished_requests():
        if steps in (10, 30, 50, 70):
            request_id = f"quiet {steps}"
            output = engine.add_request(request_id, {"prompt_token_ids": [7, 9] * 20}, QUIET, tenant=quiet)
            waiting[request_id] = output, steps
        engine.step()
        steps += 1
        for request_id, (output, begin) in list(waiting.items()):
            if output.outputs[0].token_ids:
                first.append(steps - begin)
                del waiting[request_id]
    return first, steps, llm.stats().output_tokens - before


@pytest.mark.parametrize(
    "name",
    ["slots are short", pytest.param("blocks are short", marks=pytest.mark.long), "blocks are short, compressed"],
)
def test_a_quiet_tenant_is_served_at_once_and_nothing_is_lost(name: str) -> None:
    llm = make_llm(DEFAULT_MODEL, max_model_len=256, **OPTIONS[name])
    fifo_first, fifo_steps, fifo_tokens = run(llm, "", "")
    first, steps, num_tokens = run(llm, "noisy", "quiet")
    assert max(fifo_first) > 50
    assert len(first) == 4 and max(first) <= 3
    assert num_tokens == fifo_tokens == 80 * 40 + 4 * 8
    assert num_tokens / steps > 0.95 * fifo_tokens / fifo_steps
    assert llm.llm_engine.scheduler.blocks.num_owned == 0
