"""Options of an engine: one place for names, defaults and checks, and errors before any work starts."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvllm import LLM, ConfigError
from kvllm.engine_args import EngineArgs
from tests.helpers.checkpoints import checkpoint_fixture

OPTIONS = [field.name for field in fields(EngineArgs)]
WRONG_TYPE: dict[str, Any] = {
    **dict.fromkeys(OPTIONS, "x"),
    **dict.fromkeys((field.name for field in fields(EngineArgs) if isinstance(field.default, str)), 5),
    "distributed_executor_backend": 5,
    "model": 5,
    "tokenizer": 5,
    "revision": 5,
}


path = checkpoint_fixture("llama", num_hidden_layers=1)


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if weights are read or workers are started: the error must come first."""

    def start(*args: Any, **options: Any) -> None:
        raise AssertionError("work was started before the error")

    monkeypatch.setattr("kvllm.engine_builder.make_runner", start)
    monkeypatch.setattr("kvllm.engine_builder._start_workers", start)


FRACTIONS = ("gpu_memory_utilization", "kv_offloading_size", "swap_space", "kv_offloading_disk_size")
"""Options for which 1.5 is of the right type."""


@pytest.mark.parametrize("option", OPTIONS)
def test_a_wrong_type_is_named(option: str) -> None:
    for value in (WRONG_TYPE[option], [], 1.5 if option not in FRACTIONS else "1.5"):
        with pytest.raises(ConfigError) as caught:
            LLM(**{option: value})
        assert str(caught.value).startswith(f"{option}={value!r}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 10**9}, "max_num_seqs=1000000000 is not allowed: at most 65536"),
        ({"max_num_batched_tokens": 2**70}, "max_num_batched_tokens=.* is not allowed: at most 2147483647"),
        ({"max_model_len": 2**70}, "max_model_len=.* is not allowed: at most"),
        ({"max_model_len": 1}, "max_model_len=1 is not allowed: at least 2"),
        ({"max_model_len": 10**9}, "max_model_len=1000000000 is not allowed: between 2 and the model's"),
        ({"num_gpu_blocks_override": 10**12}, r"num_gpu_blocks_override=.*: it takes .* GiB of memory are free"),
        ({"num_gpu_blocks_override": 2**70}, "num_gpu_blocks_override=.* is not allowed: at most"),
        ({"num_gpu_blocks_override": -5}, "num_gpu_blocks_override=-5 is not allowed: at least 1"),
        (
            {"kv_cache_memory_bytes": 10**15},
            r"kv_cache_memory_bytes=.*: it takes 9.* GiB, and .* GiB of memory are free",
        ),
        ({"kv_cache_memory_bytes": 2**70}, "kv_cache_memory_bytes=.* is not allowed: at most"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0 is not allowed: at least 1"),
        ({"block_size": 2**70}, "block_size=.* is not allowed: between 1 and 256"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan is not allowed"),
        ({"gpu_memory_utilization": 1e300}, "gpu_memory_utilization=1e.300 is not allowed"),
        ({"tensor_parallel_size": 10**6}, "tensor_parallel_size=1000000 is not allowed: at most 1024"),
        ({"data_parallel_size": 10**6}, "data_parallel_size=1000000 is not allowed: at most 1024"),
        ({"max_worker_restarts": 2**70}, "max_worker_restarts=.* is not allowed: at most"),
        ({"seed": 2**64}, "seed=18446744073709551616 is not allowed: at most"),
        ({"seed": -(2**64)}, "seed=-18446744073709551616 is not allowed: at least"),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 2}, "max_num_batched_tokens=2 .* at least max_num_seqs=3"),
    ],
    ids=str,
)
def test_absurd_sizes(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(path, **({"block_size": 16} | options))


def test_options_are_checked_before_the_checkpoint_is_looked_at() -> None:
    with pytest.raises(ConfigError, match="enforce_eager='x'"):
        LLM("/nowhere", enforce_eager="x")


def test_the_constructor_shows_all_options() -> None:
    """The signature is the one that editors and `help` show, and that the docstring describes."""
    assert inspect.signature(LLM).parameters == inspect.signature(EngineArgs).parameters
    assert list(inspect.signature(LLM).parameters) == OPTIONS
    for option in OPTIONS:
        assert f"        {option}: " in str(LLM.__init__.__doc__), option


def test_every_option_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    assert all(f"`{option}`" in text for option in OPTIONS)


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)


def test_options_need_no_torch() -> None:
    code = "import sys, kvllm.engine_args; print('torch' in sys.modules, 'ray' in sys.modules)"
    assert in_a_process(code).stdout.split() == ["False", "False"]


def test_a_single_process_imports_nothing_of_ray(path: Path) -> None:
    code = f"""if True:
        import sys
        from kvllm import LLM
        llm = LLM({str(path)!r}, num_gpu_blocks_override=4, block_size=16, max_model_len=64)
        print(len(llm.generate([[5, 6]], use_tqdm=False)[0].outputs[0].token_ids))
        print([name for name in sys.modules if name == "ray" or name.startswith(("ray.", "kvllm.distributed"))])
    """
    result = in_a_process(code, OMP_NUM_THREADS="1")
    assert result.stdout.splitlines() == ["16", "[]"]
    lines = [line for line in result.stderr.splitlines() if "kvllm" in line]
    assert len(lines) == 2 and f"{path.name} (LlamaForCausalLM, float32) on cpu" in lines[0]
    assert f"{path} has no tokenizer" in lines[1]
