"""Methods of other packages: one file that registers itself, found by its entry point, with no file of ours touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.compression import MethodSpec, register, specs
from kvllm.compression.methods import keydiff
from kvllm.errors import ConfigError
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.packages import run_with_package

METHOD = """
from kvllm.compression import MethodSpec, Option, register
from kvllm.compression.methods.token2chunk import top_indices
from kvllm.compression.region import everything, keeps_everything, with_buffer


def select(queries, keys, *, retain, buffer, power=1):
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    peaks = keys.float().abs().amax(dim=-1)[..., : keys.shape[2] - buffer] ** power
    return with_buffer(top_indices(peaks, retain - buffer), keys, buffer)


register(MethodSpec("key_peak", "the keys with the largest component", options=(Option("power", 1, 1, 3),)), select)
"""
SCRIPT = """
import sys
from kvllm import LLM, CompressionConfig, SamplingParams

compression = CompressionConfig(
    method="key_peak", policy="periodic", period=1, window_blocks=2, retain_blocks=1, buffer=2, power=2
)
assert compression.method_options == {"power": 2}
llm = LLM(sys.argv[1], load_format="dummy", max_model_len=128, block_size=4, compression=compression)
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
print("compressed", llm.stats().windows_compressed > 0)
"""


def test_a_method_of_an_installed_package(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama")
    found = run_with_package(tmp_path / "package", "kvllm.methods", METHOD, SCRIPT, str(tmp_path / "model"))
    assert "compressed True" in found.stdout, found.stderr


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    script = 'from kvllm import CompressionConfig; CompressionConfig(method="key_peak")'
    found = run_with_package(tmp_path, "kvllm.methods", "import nothing_like_this", script)
    assert "ConfigError: the methods of 'added' cannot be loaded" in found.stderr
    assert "nothing_like_this" in found.stderr


def test_a_registered_method_chooses_as_its_function_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(specs.SPECS, "my_keydiff", raising=False)  # undone with the test
    register(MethodSpec("my_keydiff", "as keydiff, from outside"), keydiff.select)
    make_checkpoint(tmp_path, "llama")
    outputs = []
    for method in ("keydiff", "my_keydiff"):
        compression = CompressionConfig(
            method=method, policy="periodic", period=1, window_blocks=2, retain_blocks=1, buffer=2
        )
        llm = LLM(tmp_path, max_model_len=128, block_size=4, compression=compression)
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
        assert llm.stats().windows_compressed > 0
        outputs.append(output.outputs[0].token_ids)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ["kara", "auto"])
def test_names_of_this_package_are_taken(name: str) -> None:
    with pytest.raises(ConfigError, match=f"a method '{name}' is part of KvLLM"):
        register(MethodSpec(name, "another"), keydiff.select)
