"""Structured outputs where tokens are sampled in other processes: on the ranks of Ray, and in replicas."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvllm import LLM, RequestError, SamplingParams, StructuredOutputs
from kvllm.engine_args import DEFAULT_MODEL

pytest.importorskip("ray", reason="needs ray: pip install ray")
pytest.importorskip("llguidance", reason="needs llguidance: pip install llguidance")
pytestmark = pytest.mark.xdist_group("ray")

PATTERN = "([0-9]{3}[a-f]){4,9}"
OPTIONS: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 200}


def sampled(llm: LLM) -> list[str]:
    """Texts of completions that branch off from one prompt, and of a greedy one."""
    rule = StructuredOutputs(regex=PATTERN)
    params = [
        SamplingParams(n=4, seed=1, temperature=3, max_tokens=60, structured_outputs=rule),
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=rule),
    ]
    outputs = llm.generate(["ten", "so"], params, use_tqdm=False)
    assert [output.error for output in outputs] == [None, None]
    return [completion.text for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("processes", ["tensor_parallel_size", "data_parallel_size"])
@pytest.mark.usefixtures("ray_cluster")
def test_other_processes_sample_what_this_one_does(processes: str) -> None:
    expected = sampled(LLM(DEFAULT_MODEL, **OPTIONS))
    llm = LLM(DEFAULT_MODEL, **OPTIONS, **{processes: 2})
    try:
        found = sampled(llm)
        with pytest.raises(RequestError, match="too many expressions"):
            rule = StructuredOutputs(regex="(((a?){30}){30}){30}")
            llm.generate("ten", SamplingParams(structured_outputs=rule), use_tqdm=False)
    finally:
        llm.llm_engine.close()
    assert found == expected
    assert all(re.fullmatch(PATTERN, text) for text in found)
