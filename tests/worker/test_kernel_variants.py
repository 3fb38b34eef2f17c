"""No request waits for a kernel to be compiled: while an engine serves, it launches no variant that it had not launched
when it started. On the stand-in for a CUDA device, by Triton's own rule of what makes a variant."""

from __future__ import annotations

import itertools
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvllm import LLM, SamplingParams
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.cuda_stand_in import stand_in
from tests.helpers.families import FAMILIES
from tests.helpers.kernel_variants import recorded_variants
from tests.helpers.processes import run_python

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")

ENGINES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "eager, integers": {"enforce_eager": True, "quantization": "int4", "max_num_batched_tokens": 70},
    "eager, experts": {"enforce_eager": True, "max_num_batched_tokens": 300},
    "eager, recurrent layers": {"enforce_eager": True, "max_num_batched_tokens": 100, "max_num_seqs": 8},
    "graphs, a pool of what is free": {"num_gpu_blocks_override": None, "gpu_memory_utilization": 0.02},
}
FILTERS: list[dict[str, Any]] = [{"min_p": 0.1}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}]
CHANGES: list[dict[str, Any]] = [{}, {"presence_penalty": 0.5, "allowed_token_ids": [3, 5, 77]}]
PROMPT = list(range(5, 22))


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 1, "ignore_eos": True} | options))


def serve(llm: LLM) -> None:
    """Each kind of sampling alone, forks, then batches that grow to four sequences and shrink."""
    kinds = [[params(**one, **other)] for one, other in itertools.product(FILTERS, CHANGES)]
    greedy = [params(temperature=0, max_tokens=2, **change) for change in CHANGES]
    forks = params(n=2, max_tokens=2, logprobs=2)
    batch = [params(temperature=0, max_tokens=i, logprobs=i) for i in range(1, 5)]
    for requested in (*kinds, greedy, [forks], batch):
        for number, each in enumerate(requested):
            llm.llm_engine.add_request(str(number), PROMPT[number:], each)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()


def found_while_serving(path: Path, **options: Any) -> tuple[list[str], list[str]]:
    """The variants that were launched at start-up, and those that were first launched after it."""
    from kvllm.kernels import sampling

    defaults = {"max_num_seqs": 4, "num_gpu_blocks_override": 20, "max_num_batched_tokens": 20}
    few_passes = patch.object(sampling, "_FINE_PASSES", 2)  # the third and later ones are launched like it
    with stand_in(), few_passes, recorded_variants() as found:
        llm = LLM(path, device="cuda", dtype="float16", max_model_len=64, block_size=16, **(defaults | options))
        at_start = set(found)
        serve(llm)
        return sorted(at_start), sorted(found - at_start)


def run_engine(name: str) -> None:
    with TemporaryDirectory() as directory:
        if "experts" in name:
            make_checkpoint(Path(directory), "mixtral", num_hidden_layers=1)
        elif "recurrent" in name:
            two_layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
            make_checkpoint(Path(directory), **(FAMILIES["qwen3.5"] | two_layers))
        else:
            make_checkpoint(Path(directory), "qwen3", head_dim=16, num_hidden_layers=1, num_attention_heads=2)
        print(json.dumps([*found_while_serving(Path(directory), **ENGINES[name]), variants_of_strides()]))


@cache
def found_by(name: str) -> Any:
    """The variants at start-up, those that were first launched later, and those of strides."""
    return run_python(f"run_engine({name!r})", __name__, TRITON_INTERPRET="1")


SHORT = ("eager", "eager, recurrent layers")
NAMES = [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in ENGINES]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_compiled_while_an_engine_serves(name: str) -> None:
    at_start, later, _ = found_by(name)
    assert later == []
    searches = [variant for variant in at_start if variant.startswith("_search ")]
    assert len(searches) == 2 * 3 * 3  # of two dtypes, top-k, top-p and both, three kinds of passes


def variants_of_strides() -> list[int]:
    """A kernel whose strides Triton may specialize on: a multiple of 16 makes another variant, and so does 1."""
    from kvllm.kernels.store import store_kv

    cache, slots = torch.zeros(1, 1, 16, 16), torch.zeros(1, dtype=torch.int64)
    numbers = []
    for stride in (16, 32, 17, 18, 1):
        vectors = torch.zeros(100).as_strided((1, 1, 16), (stride, 16, 1))
        with recorded_variants() as found:
            store_kv(cache, cache, vectors, vectors, slots)
        numbers.append(found.pop())
    return [numbers.index(variant) for variant in numbers]


def test_a_variant_is_what_triton_would_compile() -> None:
    assert found_by("eager")[2] == [0, 0, 2, 2, 4]
