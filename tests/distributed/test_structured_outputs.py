"""Structured outputs where tokens are sampled in other processes: on the ranks of Ray, and in replicas."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvllm import LLM, RequestError, SamplingParams, StructuredOutputsParams
from kvllm.engine_args import DEFAULT_MODEL

pytest.importorskip("ray", reason="needs ray: pip install ray")
pytest.importorskip("llguidance", reason="needs llguidance: pip install llguidance")
pytestmark = pytest.mark.xdist_group("ray")

PATTERN = "([0-9]{3}[a-f]){4,9}"
OPTIONS: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 200}


def sampled(llm: LLM) -> list[str]:
    """Texts of completions that branch off from one prompt, and of a greedy one."""
    rule = StructuredOutputsParams(regex=PATTERN)
    params = [
        SamplingParams(n=4, seed=1, temperature=3, max_tokens=60, structured_outputs=rule),
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=rule),
    ]
    outputs = llm.generate(["ten", "so"], params, use_tqdm=False)
    assert [output.error for output in outputs] == [None, None]
    return [completion.text for output in outputs for completion in output.outputs]


def ready_for_rules(llm: LLM) -> list[bool]:
    """Whether each rank or replica has loaded llguidance."""
    engine: Any = llm.llm_engine
    pids = engine.replicas.pids if hasattr(engine, "replicas") else engine.executor.pids
    return ["llguidance" in Path(f"/proc/{pid}/maps").read_text() for pid in pids]


@pytest.mark.parametrize(
    ("processes", "ready"),
    [
        ("tensor_parallel_size", [True, False]),
        pytest.param("data_parallel_size", [True, True], marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("ray_cluster")
def test_other_processes_sample_what_this_one_does(processes: str, ready: list[bool]) -> None:
    """Those that sample are ready for rules before the first one comes in a step."""
    expected = sampled(LLM(DEFAULT_MODEL, **OPTIONS))
    options: dict[str, Any] = {**OPTIONS, processes: 2}
    llm = LLM(DEFAULT_MODEL, **options)
    try:
        assert ready_for_rules(llm) == ready
        found = sampled(llm)
        with pytest.raises(RequestError, match="too many expressions"):
            rule = StructuredOutputsParams(regex="(((a?){30}){30}){30}")
            llm.generate("ten", SamplingParams(structured_outputs=rule), use_tqdm=False)
    finally:
        llm.llm_engine.close()
    assert found == expected
    assert all(re.fullmatch(PATTERN, text) for text in found)
