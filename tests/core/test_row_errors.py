"""A failure that one request causes ends that request alone, with an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import force_setattr

from kvllm import LLM, RequestOutput, SamplingParams
from tests.helpers.checkpoints import checkpoint_fixture

VOCAB = 16
GOOD = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)


checkpoint = checkpoint_fixture("llama", vocab_size=VOCAB)


def serve_beside_a_broken_one(llm: LLM) -> tuple[list[RequestOutput], RequestOutput]:
    """Two good requests, and a third one whose options, once accepted, ask for more tokens than there are."""
    engine = llm.llm_engine
    good = [engine.add_request(f"good {i}", [3, 4 + i], GOOD) for i in range(2)]
    params = SamplingParams(max_tokens=12, n=2, seed=1)
    broken = engine.add_request("broken", [5, 6], params)
    force_setattr(params, "logprobs", VOCAB + 1)
    while engine.has_unfinished_requests():
        engine.step()
    return good, broken


@pytest.mark.parametrize(
    "backend", ["inline", pytest.param("ray", marks=[pytest.mark.xdist_group("ray"), pytest.mark.long])]
)
def test_the_others_are_not_disturbed(checkpoint: Path, backend: str, request: pytest.FixtureRequest) -> None:
    if backend == "ray":
        request.getfixturevalue("ray_cluster")
    llm = LLM(checkpoint, num_gpu_blocks_override=8, distributed_executor_backend=backend)
    expected = [output.outputs for output in llm.generate([[3, 4], [3, 5]], GOOD, use_tqdm=False)]
    for _ in range(2):
        good, broken = serve_beside_a_broken_one(llm)
        assert [output.outputs for output in good] == expected and not any(output.error for output in good)
        assert broken.finished and "no token could be sampled" in str(broken.error)
        assert [completion.finish_reason for completion in broken.outputs] == ["error", "error"]
    assert llm.llm_engine.scheduler.blocks.num_owned == 0
    llm.llm_engine.close()
