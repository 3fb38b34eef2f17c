"""Policies of other packages: one file that registers itself, found by its entry point; no file of ours is touched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvllm import CompressionConfig, ConfigError, Pressure, register_policy
from kvllm.core.policies import WindowOptions, WindowPolicy
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.packages import run_with_package
from tests.helpers.processes import ROOT

BLOCK = re.compile(r"```python\n(.*?class LongPolicy.*?)```", re.DOTALL)
POLICY = BLOCK.findall((ROOT / "docs" / "add-a-method.md").read_text().rpartition("## A policy")[2])[0]
SCRIPT = """
import msgspec
from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.entrypoints.engine_flags import parse_compression

flat = {"method": "keydiff", "policy": "long", "window_blocks": 2, "buffer": 2}
for least in (30, 60):
    compression = CompressionConfig(**flat, least=least)
    assert parse_compression(f"long,method=keydiff,window_blocks=2,buffer=2,least={least}") == compression
    assert msgspec.json.decode(msgspec.json.encode(compression), type=CompressionConfig) == compression
    assert type(compression.policy)(window_blocks=2, least=least) == compression.policy
    llm = LLM(sys.argv[1], load_format="dummy", max_model_len=128, block_size=4, compression=compression)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
    print("compressed", llm.stats().windows_compressed)
try:
    CompressionConfig(**flat, period=3)
except Exception as error:
    print(repr(error))

from kvllm.entrypoints import cli
command = ["simulate", sys.argv[1], "--hardware", "cpu", "--workload", sys.argv[2], "--block-size", "4"]
command += ["--num-blocks", "200", "--compression", "method=keydiff,policy=long,window_blocks=2,buffer=2,least="]
for least in ("60", "109"):
    cli.main([*command[:-1], command[-1] + least])
"""


def test_a_policy_of_an_installed_package(tmp_path: Path) -> None:
    """In an engine, and simulated."""
    make_checkpoint(checkpoint := tmp_path / "model", "llama")
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps({"num_requests": 4, "input_len": 8, "output_len": 100}))
    arguments = (tmp_path / "package", "kvllm.policies", POLICY, SCRIPT, str(checkpoint), str(workload))
    found = run_with_package(*arguments)
    most, fewer = (int(line.split()[1]) for line in found.stdout.splitlines() if line.startswith("compressed"))
    assert most == 2 and fewer == 0, found.stderr  # at 30 tokens, and when the next window is full
    assert "policy='long' has window_blocks, retain_blocks, retain_tokens, compress_prompt, least; " in found.stdout

    rows = [line.split() for line in found.stdout.splitlines() if line.startswith("windows compressed")]
    assert [int(row[2]) for row in rows] == [0, 0], found.stderr
    assert int(rows[0][3]) > 0 == int(rows[1][3])  # no request becomes as long as 109 tokens


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    script = 'from kvllm import CompressionConfig; CompressionConfig(policy="long")'
    found = run_with_package(tmp_path, "kvllm.policies", "import nothing_like_this", script)
    assert "ConfigError: the policies of 'added' cannot be loaded" in found.stderr
    assert "nothing_like_this" in found.stderr


def test_names_of_this_package_are_taken() -> None:
    class Other(WindowOptions, frozen=True, tag="pressure"):
        pass

    class OtherPolicy(WindowPolicy[Other]):
        options_type = Other

    with pytest.raises(ConfigError, match="a policy 'pressure' is part of KvLLM"):
        register_policy(OtherPolicy)
    with pytest.raises(ConfigError, match="is not allowed: give its class to register_policy first"):
        CompressionConfig(policy=Other())
    assert CompressionConfig(policy="pressure").policy == Pressure()
