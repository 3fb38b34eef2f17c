"""Times and bytes of models with experts in the simulator: worked out by hand, and from real matrices."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from kvllm.entrypoints import cli
from kvllm.errors import ConfigError
from kvllm.models.config import ModelConfig, load_model_config
from kvllm.models.mixture import make_experts
from kvllm.simulation.cost import CostModel, QueryBatch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.families import FAMILIES
from tests.simulation.test_simulation import HARDWARE, MODEL

EXPERTS: dict[str, Any] = {
    **MODEL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 2,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 5,
}
ATTENTION, MLP, ROUTER, EXPERT, HEAD = 192, 384, 32, 120, 80
"""Numbers: of q and o 64 each, of k and v 64 together; of one expert 3 x 8 x 5. 32 bytes of KV for an entry."""
OVERHEAD = 3 * 0.25 + 1.0 + 0.5


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "config.json"
    path.write_text(json.dumps(EXPERTS))
    return path


@pytest.fixture(scope="module")
def model(file: Path) -> ModelConfig:
    return load_model_config(file.parent)


def test_a_decode_reads_the_experts_of_its_tokens(model: ModelConfig) -> None:
    cost = CostModel(HARDWARE, model, "float32")
    for tokens, used in ((1, 2), (2, 3), (3, 3.5)):
        weights = 3 * ATTENTION + MLP + 2 * (ROUTER + used * EXPERT)
        found, _ = cost.forward(QueryBatch(1, tokens, 10, 10), QueryBatch(), samples=0)
        assert found == pytest.approx(weights * 4 / 1e3 + 3 * 10 * 32 / 1e3 + OVERHEAD)


def test_a_prefill_multiplies_with_the_experts_of_a_token(model: ModelConfig) -> None:
    cost = CostModel(HARDWARE, model, "float32")
    multiplied = 3 * ATTENTION + MLP + 2 * (ROUTER + 2 * EXPERT)
    _, found = cost.forward(QueryBatch(), QueryBatch(1, 100, 0, 0), samples=0)
    assert found == pytest.approx(2 * 100 * multiplied / 1e4 + OVERHEAD)


def test_the_last_layer_of_recomputed_queries_has_no_experts(model: ModelConfig) -> None:
    cost = CostModel(HARDWARE, model, "float32")
    multiplied = 3 * 64 + 2 * 64 + MLP + ROUTER + 2 * EXPERT  # queries of three layers; outputs of two
    assert cost.recompute(QueryBatch(1, 100, 0, 0)) == pytest.approx(2 * 100 * multiplied / 1e4 + 3 * 0.25)


def test_ranks_share_experts_out_and_not_the_router(model: ModelConfig) -> None:
    cost = CostModel(HARDWARE, model, "float32", tensor_parallel_size=2)
    halves = 3 * ATTENTION + MLP + 2 * 4 * EXPERT + 2 * HEAD
    assert cost.weight_bytes == 4 * (halves // 2 + 2 * ROUTER)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-some-layers", "gpt-oss", "glm4-moe"])
def test_weight_bytes_are_those_of_the_matrices(tmp_path: Path, name: str) -> None:
    weights = make_checkpoint(tmp_path, **FAMILIES[name])
    named = [(each, weight) for each, weight in weights.named_parameters() if weight.dim() > 1]
    matrices = sum(weight.nbytes for each, weight in named if not each.endswith("bias"))
    assert CostModel(HARDWARE, load_model_config(tmp_path), "float32").weight_bytes == matrices


@pytest.mark.parametrize("tokens", [0, 1, 2, 3])
def test_expected_experts_are_the_mean_over_all_choices(tokens: int) -> None:
    """Of tokens that choose two of five, each pair as often as any other."""
    choices = list(product(combinations(range(5), 2), repeat=tokens))
    mean = sum(len(set().union(*each)) for each in choices) / len(choices)
    assert make_experts(5, 2, 8).expected_used(tokens) == pytest.approx(mean)


def test_command_simulates_experts(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = file.parent / "workload.json"
    workload.write_text(json.dumps({"num_requests": 20, "input_len": 30, "output_len": 60, "range_ratio": 0}))
    files = ["--model-config", str(file), "--hardware", "cpu", "--workload", str(workload)]
    cli.main(["simulate", *files, "--block-size", "4", "--num-blocks", "200", "--compression", "none"])
    assert "output tokens/s" in capsys.readouterr().out


def test_recurrent_layers_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **FAMILIES["qwen3.5"])
    with pytest.raises(ConfigError, match="Qwen3_5ForCausalLM has recurrent layers, of whose time nothing is known"):
        CostModel(HARDWARE, load_model_config(tmp_path), "float32")
