"""The engine on the target: greedy tokens against transformers, and with compression against the engine on the CPU."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.device.check_kernels import poisoned
from benchmarks.device.log import Figures, LeftOut, Log, within
from benchmarks.device.target import Target
from kvllm import LLM, CompressionConfig, SamplingParams, Threshold
from kvllm.attention.registry import BACKENDS
from kvllm.compression.specs import SPECS
from kvllm.errors import ConfigError
from tests.helpers.checkpoints import make_checkpoint

PROMPT_LENGTHS = (1, 7, 16, 40, 63, 130, 200, 300)
NEW_TOKENS, TINY_NEW_TOKENS = 48, 12
COMPRESSED_TOKENS = 112
ON_CPU = ("cpu", "reference")
# Real shapes of everything but the number of layers, and of Llama's vocabulary.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "family": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "Llama-8B": {
        "family": "llama",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
SMALL = {"head_dim": 32, "initializer_range": 0.2}  # beside `tests.helpers.checkpoints.SIZES`
PERIODIC: dict[str, Any] = {
    "method": "kara",
    "policy": "periodic",
    "window_blocks": 3,
    "period": 8,
    "buffer": 4,
    "chunk_budget": 4,
}
COMPRESSIONS: dict[str, CompressionConfig] = {
    "kara, periodic": CompressionConfig(**PERIODIC),
    "kara, exact count": CompressionConfig(**PERIODIC, retain_tokens=17),
    "kara, pressure": CompressionConfig(**PERIODIC | {"policy": "pressure"}),
    **{
        f"{method}, threshold": CompressionConfig(
            method=method,
            method_options=SPECS[method].own(query_window=8),
            policy=Threshold(threshold_tokens=96, budget_tokens=48),
            buffer=8,
        )
        for method in ("snapkv", "adakv", "h2o")
    },
}
TINY_COMPRESSIONS = ("kara, periodic", "kara, pressure", "adakv, threshold")
COUNTERS = ("steps", "preemptions", "compression_events", "windows_compressed", "entries_evicted", "blocks_released")


def run(target: Target, log: Log) -> None:
    with tempfile.TemporaryDirectory() as directory:
        check_compression(target, log, Path(directory) / "small")
        for name, shape in target.size(FAMILIES, {"Qwen3-0.6B": FAMILIES["Qwen3-0.6B"]}).items():
            check_family(target, log, name, Path(directory) / name, dict(shape))


# Against transformers


def check_family(target: Target, log: Log, name: str, path: Path, shape: dict[str, Any]) -> None:
    """Weights are bfloat16 numbers, so that the model in float32 is the exact one of both dtypes."""
    family = shape.pop("family")
    if target.dry_run:
        shape |= {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2}
    with target.device:
        model = make_checkpoint(path, family, dtype="bfloat16", initializer_range=0.02, **shape)
    reference = model.to(target.device, torch.float32)
    prompts = random_prompts(shape["vocab_size"], target)
    check = partial(against_transformers, target, reference, path, prompts)
    for title, options in engine_options(target).items():
        log.check(f"{name}, {title}", partial(check, options))
    log.check(f"{name}, float32, all memory NaN before it is written", partial(check_poisoned, check))
    del reference, model, check
    target.release_memory()


def engine_options(target: Target) -> dict[str, dict[str, Any]]:
    options: dict[str, dict[str, Any]] = {
        "float32": {"dtype": "float32"},
        "float32, without graphs": {"dtype": "float32", "enforce_eager": True},
        "float32, blocks of 16, chunks of 64": {"dtype": "float32", "block_size": 16, "max_num_batched_tokens": 64},
        "bfloat16": {"dtype": "bfloat16"},
        "bfloat16, without graphs": {"dtype": "bfloat16", "enforce_eager": True},
    }
    for backend in BACKENDS:
        if target.dry_run or backend not in ON_CPU:
            options[f"bfloat16, attention by {backend}"] = {"dtype": "bfloat16", "attention_backend": backend}
    return options


def check_poisoned(check: partial[Figures]) -> Figures:
    with poisoned():
        return check({"dtype": "float32", "block_size": 32})


def against_transformers(
    target: Target, reference: Any, path: Path, prompts: list[list[int]], options: dict[str, Any]
) -> Figures:
    """Every token must be the one of the largest logit, up to rounding, after the tokens before it.

    The error is how far its logit is below the largest, in standard deviations of the logits. A random token's is 4.
    """
    try:
        llm = make_llm(path, **options)
    except ConfigError as error:
        if "attention_backend" in options:  # not installed here, or not for this
            raise LeftOut(str(error)) from error
        raise
    texts = generate(llm, prompts, target.size(NEW_TOKENS, TINY_NEW_TOKENS))
    del llm
    target.release_memory()
    gaps = torch.cat([gaps_of(reference, prompt, text) for prompt, text in zip(prompts, texts, strict=True)])
    allowed = 0.15 if options["dtype"] == "bfloat16" else 1e-3
    return within(float(gaps.max()), allowed, equal=float((gaps == 0).float().mean()))


@torch.inference_mode()
def gaps_of(reference: Any, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *text]], device=reference.device)
    logits = reference(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return (logits.amax(-1) - chosen) / logits.std(-1)


# With compression


def check_compression(target: Target, log: Log, path: Path) -> None:
    """The same tokens, and the same counters: how much is compressed depends neither on data nor on the device."""
    make_checkpoint(path, "qwen3", **SMALL)
    prompts = random_prompts(256, target)
    for name in target.size(tuple(COMPRESSIONS), TINY_COMPRESSIONS):
        # A pool that is short, so that sequences are preempted and "pressure" has something to do.
        options = {"block_size": 16, "num_gpu_blocks_override": 40, "compression": COMPRESSIONS[name]}
        check = partial(against_cpu, path, prompts, options)
        log.check(f"{name}, with graphs", partial(check, {}))
        if not target.dry_run:
            log.check(f"{name}, without graphs", partial(check, {"enforce_eager": True}))


def against_cpu(path: Path, prompts: list[list[int]], options: dict[str, Any], more: dict[str, Any]) -> Figures:
    found, expected = make_llm(path, **options, **more), make_llm(path, **options, device="cpu")
    tokens, expected_tokens = (generate(llm, prompts, COMPRESSED_TOKENS) for llm in (found, expected))
    counters, expected_counters = ([llm.stats()[name] for name in COUNTERS] for llm in (found, expected))
    assert counters == expected_counters, f"{COUNTERS}: {counters}, not {expected_counters}"
    assert found.stats().compression_events > 0
    differing = sum(text != expected for text, expected in zip(tokens, expected_tokens, strict=True))
    # Scores that tie but for rounding may fall out otherwise.
    return within(differing / len(tokens), 0.15, windows=found.stats().windows_compressed)


# Both


def make_llm(path: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"block_size": 256, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 512}
    return LLM(path, max_model_len=400, max_num_seqs=8, **(defaults | options))


def random_prompts(vocab_size: int, target: Target) -> list[list[int]]:
    rng = random.Random(0)
    lengths = target.size(PROMPT_LENGTHS, PROMPT_LENGTHS[:6])
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def generate(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.outputs[0].token_ids for output in outputs]
