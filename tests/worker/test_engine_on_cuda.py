"""Engines on a GPU: greedy tokens against transformers, and with compression against the engine on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, CompressionConfig
from kvllm.attention.registry import BACKENDS
from kvllm.errors import ConfigError
from kvllm.lora.request import LoRARequest
from tests.helpers.adapters import make_adapter
from tests.helpers.checkpoints import make_checkpoint, make_draft
from tests.helpers.compressions import fitting, other
from tests.helpers.devices import poisoned
from tests.helpers.engines import greedy, random_prompts, tokens
from tests.worker.test_mtp import make_with_mtp

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LENGTHS = (1, 7, 16, 40, 63, 130, 200, 300)
# Real shapes of everything but the number of layers, and of Llama's vocabulary.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "llama": {
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float32-eager": {"dtype": "float32", "enforce_eager": True},
    "float32-chunks": {"dtype": "float32", "block_size": 16, "max_num_batched_tokens": 64},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-eager": {"dtype": "bfloat16", "enforce_eager": True},
    **{name: {"dtype": "bfloat16", "attention_backend": name} for name in BACKENDS if name not in ("cpu", "reference")},
}
PERIODIC: dict[str, Any] = {"method": "kara", "policy": "periodic", "window_blocks": 3, "period": 8, "buffer": 4}
KARA = CompressionConfig(**PERIODIC, chunk_budget=4)
COMPRESSIONS = {
    "periodic": KARA,
    "exact": other(KARA, retain_tokens=17),
    "pressure": other(KARA, policy="pressure"),
    **{
        method: CompressionConfig(
            **fitting(method, "threshold", threshold_tokens=96, budget_tokens=48, query_window=8, buffer=8)
        )
        for method in ("snapkv", "adakv", "h2o")
    },
}
COUNTERS = ("steps", "preemptions", "compression_events", "windows_compressed", "entries_evicted", "blocks_released")


def make_llm(path: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"block_size": 256, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 512}
    return LLM(path, max_model_len=512, max_num_seqs=8, **(defaults | options))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of numbers of bfloat16, and transformers' model in float32: the exact one of both dtypes."""
    path = tmp_path_factory.mktemp(request.param)
    with torch.device(DEVICE):
        written = make_checkpoint(
            path, request.param, dtype="bfloat16", initializer_range=0.02, **FAMILIES[request.param]
        )
    return path, written.to(DEVICE, torch.float32)


@torch.inference_mode()
def gaps(reference: Any, prompt: list[int], text: list[int]) -> torch.Tensor:
    """How far the logit of each token is below the largest one, in standard deviations. A random token's is 4."""
    ids = torch.tensor([[*prompt, *text]], device=DEVICE)
    logits = reference(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits.amax(-1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]) / logits.std(-1)


@pytest.mark.parametrize("name", ENGINES)
def test_every_token_has_the_largest_logit_up_to_rounding(name: str, model: tuple[Path, Any]) -> None:
    path, reference = model
    prompts = random_prompts(reference.config.vocab_size, LENGTHS)
    try:
        with poisoned() if name == "float32" else nullcontext():
            llm = make_llm(path, **ENGINES[name])
            texts = tokens(llm, prompts, greedy(48))
    except ConfigError as error:
        if "attention_backend" not in ENGINES[name]:
            raise
        pytest.skip(str(error))  # not installed here, or not for this device
    allowed = 0.15 if ENGINES[name]["dtype"] == "bfloat16" else 1e-3
    for prompt, text in zip(prompts, texts, strict=True):
        assert gaps(reference, prompt["prompt_token_ids"], text).max() <= allowed


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compression_is_that_of_the_cpu(name: str, enforce_eager: bool, tmp_path: Path) -> None:
    """In a short pool, so that sequences are preempted. Counters depend neither on data nor on the device; scores that
    tie but for rounding may fall out otherwise."""
    make_checkpoint(tmp_path, "qwen3", head_dim=32, initializer_range=0.2)
    options = {"block_size": 16, "num_gpu_blocks_override": 40, "compression": COMPRESSIONS[name]}
    engines = make_llm(tmp_path, **options, enforce_eager=enforce_eager), make_llm(tmp_path, **options, device="cpu")
    found, expected = (tokens(llm, random_prompts(256, LENGTHS), greedy(112)) for llm in engines)
    counters = [[llm.stats()[counter] for counter in COUNTERS] for llm in engines]
    assert counters[0] == counters[1] and engines[0].stats().compression_events > 0
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 0.15 * len(expected)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "mtp"])
def test_tokens_with_drafts_are_those_of_the_cpu(method: str, enforce_eager: bool, tmp_path: Path) -> None:
    """All drafts are tried, and computed by another kernel than a single token: equal logits may
    fall out otherwise."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    if method == "mtp":
        make_with_mtp(tmp_path, "glm4-moe")
    else:
        make_draft(tmp_path, make_checkpoint(tmp_path, "qwen3", head_dim=32, initializer_range=0.2))
    if method == "draft_model":
        config["model"] = str(tmp_path / "draft")
    options: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 200, "dtype": "float32"}
    llm = make_llm(tmp_path, speculative_config=config, enforce_eager=enforce_eager, **options)
    llm.llm_engine.scheduler.speculation.cost = None
    engines = llm, make_llm(tmp_path, device="cpu", **options)
    found, expected = (tokens(each, random_prompts(256, LENGTHS), greedy(80)) for each in engines)
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 0.15 * len(expected)
    assert 0 < sum(llm.stats().drafts.right) < llm.stats().drafts.tokens


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tokens_with_adapters_are_those_of_the_cpu(enforce_eager: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", head_dim=32, initializer_range=0.2)
    paths = [make_adapter(tmp_path / str(rank), tmp_path, rank=rank, seed=rank) for rank in (3, 16, 64)]
    requests = [None, *(LoRARequest(path.name, 1, str(path)) for path in paths)]
    prompts, found = random_prompts(256, LENGTHS), list[list[list[int]]]()
    for device in ("cuda", "cpu"):
        options: dict[str, Any] = {"enforce_eager": enforce_eager, "device": device, "dtype": "float32"}
        llm = make_llm(
            tmp_path, enable_lora=True, max_loras=2, max_lora_rank=64, num_gpu_blocks_override=200, **options
        )
        adapters = [requests[number % 4] for number in range(len(prompts))]
        outputs = llm.generate(prompts, greedy(80), use_tqdm=False, lora_request=adapters)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert sum(a != b for a, b in zip(*found, strict=True)) <= 0.15 * len(prompts)
