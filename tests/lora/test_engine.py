"""Adapters in an engine: tokens and log probabilities are those of models with merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvllm import LLM, SamplingParams
from kvllm.lora.request import LoRARequest
from tests.helpers.adapters import ATTENTION, MLP, make_adapter, merge
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import assert_greedy, greedy, make_llm, random_token_ids
from tests.helpers.families import FAMILIES

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 4, "alpha": 6},
    "attention": {"modules": ATTENTION, "rank": 8, "use_rslora": True, "seed": 1},
    "mlp": {"modules": MLP, "rank": 3, "alpha": 5, "seed": 2},
    "patterns": {
        "rank": 5,
        "seed": 3,
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, r"layers\.[02]\.mlp\..*": 7},
        "alpha_pattern": {"v_proj": 3, "model.layers.0.mlp.up_proj": 20},
    },
    "queries": {"modules": ("q_proj",), "rank": 64, "alpha": 16, "seed": 4, "std": 0.1},
}


class Model:
    """A checkpoint, its adapters, and checkpoints with these merged."""

    def __init__(self, root: Path, family: str) -> None:
        self.path = root / "base"
        make_checkpoint(self.path, **FAMILIES[family])
        self.adapters = {name: make_adapter(root / name, self.path, **options) for name, options in ADAPTERS.items()}
        self.merged = {name: merge(root / f"{name}-merged", self.path, path) for name, path in self.adapters.items()}

    def request(self, name: str | None) -> LoRARequest | None:
        if name is None:
            return None
        return LoRARequest(name, 1 + list(self.adapters).index(name), str(self.adapters[name]))

    def llm(self, **options: Any) -> LLM:
        return make_llm(self.path, **({"enable_lora": True, "max_loras": 5, "max_lora_rank": 64} | options))

    def checkpoint(self, name: str | None) -> Path:
        return self.path if name is None else self.merged[name]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family = {"llama": "llama-tied", "qwen3": "qwen3"}[request.param]
    return Model(tmp_path_factory.mktemp(request.param), family)


NAMES = [None, "all", "attention", "mlp", "patterns", "queries", "all", None, "patterns"]


def run(llm: LLM, model: Model, prompts: list[list[int]], names: list[str | None], params: SamplingParams) -> list[Any]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False, lora_request=[model.request(name) for name in names])
    assert all(output.error is None for output in outputs)
    assert llm.llm_engine.scheduler.blocks.num_owned == 0
    return outputs


def check(model: Model, prompts: list[list[int]], names: list[str | None], outputs: list[Any]) -> None:
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        assert_greedy(model.checkpoint(name), [{"prompt_token_ids": prompt}], [output.outputs[0].token_ids])


def test_a_mixed_batch_is_that_of_merged_models(model: Model) -> None:
    prompts = random_token_ids(40, 40, 7, 100, 17, 1, 33, 63, 2)
    prompts[1] = prompts[0]
    outputs = run(model.llm(), model, prompts, NAMES, greedy(40))
    check(model, prompts, NAMES, outputs)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs[:2]}) == 2
