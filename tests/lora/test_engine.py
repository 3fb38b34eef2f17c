"""Adapters in an engine: tokens and log probabilities are those of models with merged weights."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, BeamSearchParams, CompressionConfig, ConfigError, RequestError, SamplingParams
from kvllm.config import EngineConfig
from kvllm.lora.request import LoRARequest
from kvllm.memory_plan import plan_memory
from kvllm.models.config import load_model_config
from kvllm.worker.adapter_weights import adaptable_weights
from tests.helpers.adapters import ATTENTION, MLP, copied, make_adapter, merge
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


def test_logprobs_are_those_of_the_merged_model(model: Model) -> None:
    """Of prompts, too, and whatever is computed beside: chunks of 16 tokens."""
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=5, prompt_logprobs=3, ignore_eos=True)
    prompts = random_token_ids(40, 23, 9)
    llm = model.llm(max_num_batched_tokens=16, max_num_seqs=4)
    outputs = run(llm, model, prompts, ["all", None, "patterns"], params)
    for prompt, name, output in zip(prompts, ["all", None, "patterns"], outputs, strict=True):
        merged = make_llm(model.checkpoint(name))
        (expected,) = merged.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        for mine, others in ((output.outputs[0].logprobs, expected.outputs[0].logprobs),):
            for found, wanted in zip(mine, others, strict=True):
                assert found.keys() == wanted.keys()
                for token_id, each in found.items():
                    assert each.logprob == pytest.approx(wanted[token_id].logprob, abs=2e-4)
        for found, wanted in zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            for token_id, each in found.items():
                if token_id in wanted:
                    assert each.logprob == pytest.approx(wanted[token_id].logprob, abs=2e-4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("one"), "llama-tied")


def test_the_memory_of_an_adapter_is_what_is_planned(llama: Model, tmp_path: Path) -> None:
    """Of one with the highest rank in all matrices, as `kvllm plan` says and a GPU keeps free."""
    llm = llama.llm(max_loras=1, max_lora_rank=16)
    request = LoRARequest("wide", 1, str(make_adapter(tmp_path / "wide", llama.path, rank=16)))
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], greedy(1), use_tqdm=False, lora_request=request)
    runner: Any = llm.llm_engine.executor.runner
    matrices = {weight.target.matrix for weight in adaptable_weights(runner.model.weights()).values()}
    held = [each.down.nbytes + each.up.nbytes for matrix in matrices for each in matrix.adapters.adapters.values()]
    assert len(held) == 3 * 4
    config = EngineConfig(num_blocks=1, max_model_len=64, max_loras=1, max_lora_rank=16)
    assert plan_memory(load_model_config(llama.path), config, "float32").rank_adapter_bytes == sum(held)


def test_prefixes_are_shared_within_an_adapter(llama: Model) -> None:
    """Also after other adapters have had its memory, and where another name has the same files."""
    llm = llama.llm(max_loras=1)
    (prompt,) = random_token_ids(64)

    def cached(request: LoRARequest | None) -> tuple[int, list[int]]:
        given = [{"prompt_token_ids": prompt}]
        (output,) = llm.generate(given, greedy(12), use_tqdm=False, lora_request=request)
        assert output.metrics is not None
        return output.metrics.num_cached_tokens, output.outputs[0].token_ids

    found = {}
    for name in (None, "all", "mlp", "patterns"):
        hits, found[name] = cached(llama.request(name))
        assert hits == 0
        assert_greedy(llama.checkpoint(name), [{"prompt_token_ids": prompt}], [found[name]])
    for name in (None, "all", "mlp", "patterns"):
        assert cached(llama.request(name)) == (48, found[name])
    assert cached(LoRARequest("another", 77, str(llama.adapters["all"]))) == (48, found["all"])


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 18, "max_num_seqs": 5},
        {"num_gpu_blocks_override": 18, "max_num_seqs": 5, "swap": "always", "kv_offloading_size": 0.01},
        {"num_gpu_blocks_override": 18, "max_num_seqs": 5, "async_scheduling": True},
        {"max_loras": 1, "max_num_seqs": 3},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    ],
    ids=["preempted", "swapped", "ahead", "one-at-once", "drafts"],
)
def test_nothing_else_changes_tokens(llama: Model, options: dict[str, Any]) -> None:
    prompts = random_token_ids(60, 40, 30, 20, 33)
    names = ["all", None, "mlp", "all", "patterns"]
    llm = llama.llm(**options)
    outputs = run(llm, llama, prompts, names, greedy(60))
    check(llama, prompts, names, outputs)
    if "num_gpu_blocks_override" in options:
        assert llm.stats().preemptions > 0


def test_a_model_drafts_for_itself_with_the_adapter(llama: Model) -> None:
    """By so short texts it drafts what it chooses."""
    llm = llama.llm(speculative_config={"method": "self", "num_speculative_tokens": 3})
    llm.llm_engine.scheduler.speculation.cost = None
    prompts, names = random_token_ids(30, 20, 33), ["all", None, "mlp"]
    check(llama, prompts, names, run(llm, llama, prompts, names, greedy(30)))
    assert sum(llm.stats().drafts.right) == llm.stats().drafts.tokens > 60


def test_several_completions_and_beams(llama: Model) -> None:
    (prompt,) = random_token_ids(30)
    given = [{"prompt_token_ids": prompt}]
    params = SamplingParams(n=3, temperature=1, max_tokens=12, seed=5, ignore_eos=True)
    merged = make_llm(llama.merged["all"])
    llm = llama.llm()
    (found,) = llm.generate(given, params, use_tqdm=False, lora_request=llama.request("all"))
    (expected,) = merged.generate(given, params, use_tqdm=False)
    assert [each.token_ids for each in found.outputs] == [each.token_ids for each in expected.outputs]
    beams = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
    (found,) = llm.beam_search(given, beams, lora_request=llama.request("all"))
    (expected,) = merged.beam_search(given, beams)
    assert [each.tokens for each in found.sequences] == [each.tokens for each in expected.sequences]


@pytest.mark.parametrize("method", ["kara", "kvzip", "keydiff"])
def test_compression_chooses_as_for_the_merged_model(llama: Model, method: str) -> None:
    """Queries are computed again with the sequence's adapter, and a text is repeated with it."""
    options = {"compression": CompressionConfig(method=method, policy="periodic")}
    (prompt,) = random_token_ids(100)
    for name in ("all", "queries"):  # alone and in fresh engines: steps and batch mates change when one compresses
        (found,) = run(llama.llm(**options), llama, [prompt], [name], greedy(200))
        merged = make_llm(llama.merged[name], **options)
        (expected,) = merged.generate([{"prompt_token_ids": prompt}], greedy(200), use_tqdm=False)
        assert merged.stats().windows_compressed > 0
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_weights_of_8_bits(llama: Model) -> None:
    """The adapter is added to the product of rounded weights: nearer to the merged model than what rounding costs."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    options = {"max_logprobs": -1}
    given = [{"prompt_token_ids": prompt} for prompt in random_token_ids(40, 30, 20)]

    def logprobs(llm: LLM, name: str | None = None) -> torch.Tensor:
        request = llama.request(name)
        outputs = llm.generate(given, params, use_tqdm=False, lora_request=request)
        rows = [output.outputs[0].logprobs[0] for output in outputs]
        return torch.tensor([[row[token_id].logprob for token_id in sorted(row)] for row in rows])

    rounded = logprobs(llama.llm(quantization="int8", **options), "all")
    exact = logprobs(make_llm(llama.merged["all"], **options))
    base = logprobs(make_llm(llama.path, **options))
    cost = logprobs(make_llm(llama.path, quantization="int8", **options)) - base
    assert (rounded - exact).abs().mean() < 2 * cost.abs().mean() < 0.2 * (exact - base).abs().mean()


def test_experts_are_refused_and_their_attention_is_not(tmp_path: Path) -> None:
    path = tmp_path / "moe"
    make_checkpoint(path, **FAMILIES["qwen3-moe"])
    adapter = make_adapter(tmp_path / "attention", path, ATTENTION)
    merged = merge(tmp_path / "merged", path, adapter)
    (prompt,) = random_token_ids(30)
    llm = make_llm(path, enable_lora=True)
    given = [{"prompt_token_ids": prompt}]
    (output,) = llm.generate(given, greedy(20), use_tqdm=False, lora_request=LoRARequest("a", 1, str(adapter)))
    (expected,) = make_llm(merged).generate(given, greedy(20), use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    experts = copied(adapter, tmp_path / "experts", {"self_attn.q_proj": "mlp.experts.0.up_proj"})
    with pytest.raises(RequestError, match=r"adapts model\.layers\.0\.mlp\.experts\.0\.up_proj.* that are no experts"):
        llm.generate(given[0], greedy(1), use_tqdm=False, lora_request=LoRARequest("b", 2, str(experts)))


def test_fused_projections(tmp_path: Path) -> None:
    path = tmp_path / "phi3"
    make_checkpoint(path, **FAMILIES["phi3"])
    adapter = make_adapter(tmp_path / "fused", path, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
    merged = merge(tmp_path / "merged", path, adapter)
    (prompt,) = random_token_ids(30)
    llm = make_llm(path, enable_lora=True)
    request = LoRARequest("a", 1, str(adapter))
    (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy(20), use_tqdm=False, lora_request=request)
    assert_greedy(merged, [{"prompt_token_ids": prompt}], [output.outputs[0].token_ids])


def test_a_bad_adapter_harms_nobody(llama: Model, tmp_path: Path) -> None:
    """One that vanishes after its check ends its request alone, and what was cached of it is not found again."""
    prompts = random_token_ids(40, 40, 40)
    llm = llama.llm()
    engine = llm.llm_engine
    lost = tmp_path / "lost"
    shutil.copytree(llama.adapters["mlp"], lost)
    names = [None, "all"]
    for number, name in enumerate(names):
        engine.add_request(str(number), prompts[number], greedy(30), lora_request=llama.request(name))
    engine.step()
    bad = engine.add_request("bad", prompts[2], greedy(30), lora_request=LoRARequest("lost", 9, str(lost)))
    (lost / "adapter_model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match=r"has no adapter_model\.safetensors"):
        engine.add_request("worse", prompts[2], greedy(30), lora_request=LoRARequest("lost", 9, str(lost)))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert bad.error and re.search("the adapter 'lost' cannot be read: .*adapter_model", str(bad.error))
    check(llama, prompts[:2], names, [outputs["0"], outputs["1"]])
    (tmp_path / "elsewhere").rename(lost / "adapter_model.safetensors")
    given = [{"prompt_token_ids": prompts[2]}]
    (found,) = llm.generate(given, greedy(30), use_tqdm=False, lora_request=LoRARequest("lost", 9, str(lost)))
    assert found.metrics is not None and found.metrics.num_cached_tokens == 0
    assert_greedy(llama.merged["mlp"], given, [found.outputs[0].token_ids])


def test_files_that_are_written_again_are_another_adapter(llama: Model, tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    shutil.copytree(llama.adapters["all"], path)
    llm, (prompt,) = llama.llm(), random_token_ids(40)
    for name in ("all", "mlp"):
        shutil.copytree(llama.adapters[name], path, dirs_exist_ok=True)
        os.utime(path / "adapter_model.safetensors")
        outputs = llm.generate(
            [{"prompt_token_ids": prompt}], greedy(10), use_tqdm=False, lora_request=LoRARequest("x", 1, str(path))
        )
        check(llama, [prompt], [name], outputs)


def test_one_of_several_prompts_is_refused(llama: Model, tmp_path: Path) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in random_token_ids(20, 20)]
    requests = [LoRARequest("absent", 1, str(tmp_path)), llama.request("all")]
    refused, served = llama.llm().generate(prompts, greedy(5), use_tqdm=False, lora_request=requests)
    assert isinstance(refused.error, RequestError) and "has no adapter_config.json" in str(refused.error)
    check(llama, [prompts[1]["prompt_token_ids"]], ["all"], [served])


def test_engines_that_take_none(llama: Model) -> None:
    with pytest.raises(RequestError, match="set enable_lora"):
        make_llm(llama.path).generate([5, 6], use_tqdm=False, lora_request=llama.request("all"))
    with pytest.raises(ConfigError, match="max_lora_rank=65 is not allowed: at most 64"):
        llama.llm(max_lora_rank=65)
