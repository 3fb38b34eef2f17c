"""Bad input: each error names what was given and what is allowed, and comes before any weights are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvllm import LLM, CheckpointError, ConfigError, RequestError, SamplingParams, TenantConfig
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import paper_compression

path = checkpoint_fixture("llama")


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, block_size=16, num_gpu_blocks_override=8)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if weights are read: the error must come first."""

    def read(*args, **kwargs):
        raise AssertionError("weights were read before the error")

    monkeypatch.setattr("kvllm.worker.build.load_model", read)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8' is not allowed: choose one of auto, bfloat16, float16, float32"),
        ({"max_model_len": 100_000}, "max_model_len=100000 .* max_position_embeddings=512"),
        ({"max_model_len": 200, "num_gpu_blocks_override": 5}, "needs 13 KV blocks of 16 tokens and the pool has 5"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override=0 is not allowed: at least 1"),
        ({"max_num_seqs": "8"}, "max_num_seqs='8': Expected `int`, got `str`"),
        ({"kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes=10 is not allowed: at least one block of 16 tokens"),
        ({"kv_cache_memory_bytes": 1 << 20, "num_gpu_blocks_override": 4}, "both size the KV pool: give one"),
        ({"block_size": 0}, "block_size=0 is not allowed: between 1 and 256"),
        ({"block_size": 512}, "block_size=512 is not allowed"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens=32 .* at least max_num_seqs=64"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 is not allowed: a divisor of the model's 2 KV heads"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 is not allowed: at least 1"),
        ({"attention_backend": "flash"}, "unknown attention backend 'flash': use 'auto' or one of cpu, flash_attn"),
        ({"load_format": "pt"}, "load_format='pt' is not allowed: choose one of auto, dummy"),
        ({"quantization": "int3"}, "quantization='int3' is not allowed: choose one of int8, int4, dtype, None"),
        (
            {"compression": paper_compression(method="kara", buffer=32)},
            "buffer=32 is not allowed: at most what a window keeps, 16 KV pairs",
        ),
        (
            {"compression": paper_compression(method="kara", buffer=4, retain_tokens=49)},
            "retain_tokens=49 .* between 1 and 48",
        ),
        ({"compression": {"method": "kara"}}, "compression="),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching='yes': Expected `bool`"),
    ],
    ids=str,
)
def test_wrong_options(path: Path, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(path, **({"block_size": 16} | options))


def test_a_typo_in_an_option_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match="LLM has no option 'max_model_length'; did you mean max_model_len"):
        LLM(path, max_model_length=100)
    with pytest.raises(ConfigError, match="no option 'window_block'; did you mean window_blocks"):
        paper_compression(method="kara", window_block=3)
    with pytest.raises(ConfigError, match="no option 'max_token'; did you mean max_tokens"):
        SamplingParams(max_token=3)
    with pytest.raises(ConfigError, match="TenantConfig has no option 'x': it has weight, guaranteed_share"):
        TenantConfig(x=1)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is not a directory: give the directory of a checkpoint"):
        LLM(tmp_path / "nowhere")


def test_no_safetensors(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(CheckpointError, match="safetensors"):
        LLM(tmp_path)


def test_unknown_architecture(path: Path, tmp_path: Path) -> None:
    config = json.loads((path / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"MambaForCausalLM.*Qwen3ForCausalLM"):
        LLM(tmp_path)


def test_shape_mismatch(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*7.*64"):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ([1] * 512, "the prompt has 512 tokens; max_model_len=512 allows 511 and one generated token"),
        ([1, 256], "token id 256 is not in the vocabulary: allowed are 0 to 255"),
        ([-1], "token id -1 is not in the vocabulary"),
        ({"text": "hello"}, "needs 'prompt' or 'prompt_token_ids'"),
        ("hello", "the checkpoint has no tokenizer"),
        (3.5, "a prompt is a string, a list of token ids or a dict with one of them, not float"),
        ({"prompt_token_ids": [1.5]}, "a prompt is a list of integer token ids, 1.5 is not one"),
        (b"abc", "a prompt is a string, a list of token ids or a dict with one of them, not bytes"),
        ([1] * 120, r"prompt of 120 tokens .* needs 9 KV blocks of 16 tokens, the pool has 8"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_one_bad_request_is_its_own_error_and_the_others_finish(llm: LLM, prompt, message: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate([[5, 6], prompt, [7]], params, use_tqdm=False)
    assert isinstance(outputs[1].error, RequestError) and outputs[1].finished and not outputs[1].outputs
    with pytest.raises(RequestError, match=message):
        raise outputs[1].error
    assert [len(outputs[i].outputs[0].token_ids) for i in (0, 2)] == [20, 20]


def test_a_single_bad_prompt_raises(llm: LLM) -> None:
    with pytest.raises(RequestError, match="token id 999"):
        llm.generate({"prompt_token_ids": [999]}, use_tqdm=False)
    with pytest.raises(RequestError, match=r"n=300 completions.*max_num_seqs=256"):
        llm.generate({"prompt_token_ids": [9]}, SamplingParams(n=300), use_tqdm=False)
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate({"prompt_token_ids": [9]}, [SamplingParams()] * 2, use_tqdm=False)
    with pytest.raises(ConfigError, match=r"sampling_params=\{'temperature': 0\} is not allowed: .* SamplingParams"):
        llm.generate([[9], [9]], [SamplingParams(), {"temperature": 0}], use_tqdm=False)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate({"prompt_token_ids": [9]}, SamplingParams(stop="x"), use_tqdm=False)
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_negative_temperature() -> None:
    with pytest.raises(ConfigError, match=r"temperature=-1.* is not allowed: between 0 and 1,000,000"):
        SamplingParams(temperature=-1)


def test_a_request_id_can_be_used_once_at_a_time(llm: LLM) -> None:
    engine = llm.llm_engine
    output = engine.add_request("same", [1, 2], SamplingParams(max_tokens=3))
    with pytest.raises(RequestError, match="request_id='same' is in use"):
        engine.add_request("same", [1, 2], SamplingParams(max_tokens=3))
    with pytest.raises(RequestError, match="unfinished requests"):
        llm.generate([[1]], use_tqdm=False)
    engine.abort("same")
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("options", "prompt_length", "budget", "message"),
    [
        (None, 2, 20, "budget_tokens=20 needs an engine with .*threshold"),
        ({"window_blocks": 2, "buffer": 4}, 2, 20, "budget_tokens=20 needs an engine with .*threshold"),
        ({"budget_tokens": 50}, 2, 20, "budget_tokens=20 needs an engine with .*threshold.* that drops something"),
        ({}, 2, 4, "budget_tokens=4 leaves no room: buffer=4 and one KV pair more make 5"),
        ({"protect_prompt": True}, 17, 36, "budget_tokens=36 .* 17 tokens of the protected prompt .* make 37.*shorten"),
        ({"protect_prompt": True}, 33, None, "budget_tokens=30 leaves no room"),
    ],
)
def test_budgets_of_requests(
    path: Path, options: dict | None, prompt_length: int, budget: int | None, message: str
) -> None:
    """A bad budget is refused before any work, a good one beside it is served."""
    threshold = {"policy": "threshold", "method": "keydiff", "threshold_tokens": 50, "budget_tokens": 30, "buffer": 4}
    if options is not None:
        options = options if "window_blocks" in options else threshold | options
    compression = None if options is None else paper_compression(**options)
    llm = LLM(path, block_size=16, num_gpu_blocks_override=40, max_model_len=200, compression=compression)
    good, bad = (SamplingParams(max_tokens=3, ignore_eos=True, budget_tokens=tokens) for tokens in (None, budget))
    refused, served = llm.generate([[1] * prompt_length, [1, 2]], [bad, good], use_tqdm=False)
    assert refused.finished and not refused.outputs
    with pytest.raises(RequestError, match=message):
        raise refused.error
    assert len(served.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("options", "retained", "message"),
    [
        (None, 1, "retain_blocks=1 needs an engine with compression of windows, .*this one drops nothing"),
        ({"window_blocks": 2, "retain_blocks": 2}, 1, "retain_blocks=1 needs an engine .*this one drops nothing"),
        ({"policy": "threshold", "threshold_tokens": 50, "budget_tokens": 30}, 1, "a threshold has budget_tokens"),
        ({}, 4, "retain_blocks=4 is not allowed: between 2, which hold buffer=20 .* and window_blocks=3"),
        ({}, 1, "retain_blocks=1 is not allowed: between 2"),
    ],
)
def test_retained_blocks_of_requests(path: Path, options: dict | None, retained: int, message: str) -> None:
    """A number of blocks that no window of the engine can keep is refused, one beside it served."""
    windows = {"window_blocks": 3, "retain_blocks": 2} if options == {} else {}
    compression = None if options is None else paper_compression(method="keydiff", buffer=20, **windows, **options)
    llm = LLM(path, block_size=16, num_gpu_blocks_override=40, max_model_len=200, compression=compression)
    bad = SamplingParams(max_tokens=3, retain_blocks=retained)
    good = SamplingParams(max_tokens=3, ignore_eos=True, compress=False)
    refused, served = llm.generate([[1, 2], [1, 2]], [bad, good], use_tqdm=False)
    with pytest.raises(RequestError, match=message):
        raise refused.error
    assert len(served.outputs[0].token_ids) == 3


def test_numpy_token_ids(llm: LLM) -> None:
    (output,) = llm.generate([np.array([5, 6])[:2].tolist()], SamplingParams(max_tokens=2), use_tqdm=False)
    (same,) = llm.generate([list(np.array([5, 6]))], SamplingParams(max_tokens=2), use_tqdm=False)
    assert same.prompt_token_ids == output.prompt_token_ids == [5, 6]


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


@pytest.mark.parametrize("when", ["before the step", "after it"])
def test_an_interrupt_loses_no_request(llm: LLM, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Ctrl-C comes at any point of a step, and the worker may have executed the plan or not."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in llm.generate([[1, 2], [3]], params, use_tqdm=False)]
    engine, launch = llm.llm_engine, llm.llm_engine.executor.launch
    outputs = [engine.add_request(f"{when} {i}", prompt, params) for i, prompt in enumerate([[1, 2], [3]])]

    def interrupt(plan):
        if when == "after it":
            launch(plan)
        raise KeyboardInterrupt

    for good_steps in (0, 1, 4):
        for _ in range(good_steps):
            engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(engine.executor, "launch", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_generate_aborts_what_an_interrupt_left(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(plan):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.executor, "launch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2], [3]], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    (output,) = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert output.finished
