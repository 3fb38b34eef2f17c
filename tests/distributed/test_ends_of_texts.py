"""Texts end on ranks and replicas at the tokens that only the tokenizer names, as they do in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvllm import LLM, SamplingParams
from tests.helpers.ends import END, OTHER, make_checkpoint_with_end

pytest.importorskip("ray", reason="needs ray: pip install ray")
pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
def test_ranks_of_replicas(tmp_path: Path) -> None:
    make_checkpoint_with_end(tmp_path, "tokenizer_config.json")
    sizes = {"block_size": 16, "num_gpu_blocks_override": 40, "max_num_seqs": 8}
    params = [
        SamplingParams(temperature=0, max_tokens=20, skip_special_tokens=False),
        SamplingParams(temperature=0, max_tokens=20, min_tokens=6, skip_special_tokens=False),
    ]
    llm = LLM(tmp_path, tensor_parallel_size=2, data_parallel_size=2, **sizes)
    try:
        found = [output.outputs[0] for output in llm.generate(["\n"] * 4, params * 2, use_tqdm=False)]
    finally:
        llm.llm_engine.close()
    assert [(each.text, each.finish_reason, len(each.token_ids)) for each in found[::2]] == [
        ("<think>ab", "stop", 4)
    ] * 2
    for each in found[1::2]:
        assert len(each.token_ids) >= 6 and END not in each.text and OTHER not in each.text
