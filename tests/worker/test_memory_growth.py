"""The memory that a process takes for matrix products of ever new shapes."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from kvllm import LLM, SamplingParams
from tests.helpers.processes import run_python

MIB = 1 << 20
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
}


def grow(path: str) -> None:
    """Print the bytes by which this process grows over 100 prompts, each of a length of its own."""
    llm = LLM(path, load_format="dummy", block_size=16, num_gpu_blocks_override=64, enable_prefix_caching=False)
    params, resident = SamplingParams(max_tokens=1), []
    for length in range(2, 142):
        llm.generate([[3] * length], params, use_tqdm=False)
        resident.append(psutil.Process().memory_info().rss)
    print(json.dumps(resident[-1] - resident[40]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint without weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_products_of_ever_new_shapes_are_not_kept(path: Path) -> None:
    """After 41 shapes, 100 more take no memory. Primitives of oneDNN, one for each shape, would take 150 MiB."""
    assert run_python(f"grow({str(path)!r})", __name__) < 40 * MIB
