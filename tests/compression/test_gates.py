"""The file of a method's gates: what a rank reads of it, and its errors."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvllm import LLM, CheckpointError, CompressionConfig
from kvllm.compression.gates import Gates, gates_file, read_gates, write_gates
from kvllm.models.config import load_model_config
from kvllm.parallel import KVHeads
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.gates import random_gates

CPU = torch.device("cpu")
METHODS = ("dms", "trimkv")
LAYERS, KV_HEADS, WIDTH = 3, 2, 16


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "qwen3", head_dim=WIDTH)
    return tmp_path


def test_a_rank_reads_the_gates_of_its_kv_heads(checkpoint: Path) -> None:
    """Replicas of a KV head read the same."""
    model, gates = load_model_config(checkpoint), random_gates(LAYERS, KV_HEADS, WIDTH)
    write_gates(checkpoint, "dms", gates, {})
    of_ranks = ((KVHeads(0, 2, 1), slice(0, 2)), (KVHeads(1, 1, 1), slice(1, 2)), (KVHeads(0, 1, 2), slice(0, 1)))
    for heads, of_rank in of_ranks:
        found = read_gates(checkpoint, "dms", model, heads, CPU)
        for field in fields(Gates):
            whole = getattr(gates, field.name)
            assert torch.equal(getattr(found, field.name), whole[:, of_rank])
            assert torch.equal(getattr(found.of_layers([2, 0]), field.name), whole[[2, 0]][:, of_rank])


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_without_gates_of_the_method_is_refused(checkpoint: Path, method: str) -> None:
    def refusal() -> str:
        with pytest.raises(CheckpointError) as error:
            LLM(checkpoint, num_gpu_blocks_override=4, compression=CompressionConfig(method=method))
        return str(error.value)

    file, other = checkpoint / gates_file(method), checkpoint / gates_file(METHODS[1 - METHODS.index(method)])
    command = f"kvllm calibrate {checkpoint} --gates {method}"
    write_gates(checkpoint, method, random_gates(LAYERS, KV_HEADS, WIDTH), {})
    file.rename(other)
    assert f"has no {file.name}, which method={method!r} needs" in refusal() and command in refusal()
    file.write_bytes(other.read_bytes()[:-4])
    assert "cannot be read" in refusal() and command in refusal()
    for gates in (random_gates(LAYERS, KV_HEADS, WIDTH // 2), random_gates(LAYERS - 1, KV_HEADS, WIDTH)):
        write_gates(checkpoint, method, gates, {})
        assert f"{file} is not of this model" in refusal() and command in refusal()
    tensors = load_file(other)
    for wrong in (
        {name: tensors[name] for name in ("hidden", "hidden_bias", "output_bias")},
        tensors | {"hidden_bias": tensors["hidden_bias"][..., 1:].contiguous()},
        tensors | {"output": tensors["output"].half()},
        tensors | {"output": tensors["output"][0, 0, 0]},
    ):
        save_file(wrong, file)
        assert f"{file} is not of this model" in refusal()
