"""Quantized checkpoints against checkpoints of the values that they stand for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvllm import LLM, SamplingParams
from kvllm.attention.cpu import CpuBackend
from kvllm.errors import CheckpointError, ConfigError
from kvllm.models.base import Decoder
from kvllm.models.config import load_model_config
from kvllm.models.layers import quantized_matrices
from kvllm.models.loader import load_model, random_model
from kvllm.models.parts import GatedMLP
from kvllm.parallel import SingleRank
from kvllm.worker.self_test import check_integers
from tests.helpers.checkpoints import edit
from tests.helpers.families import FAMILIES
from tests.helpers.paged_model import CPU, PagedModel, load, tokens
from tests.helpers.processes import run_python
from tests.helpers.quantized import QWEN3, Quantize, awq, compressed_integers, float8, gptq, quantize_checkpoint
from tests.helpers.thread_shard import ThreadShard

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 32]}


def compressed(strategy: str, form: str = "float-quantized", **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def packed(bits: int, group: int, **weights: Any) -> dict[str, Any]:
    return compressed("group", "pack-quantized", type="int", num_bits=bits, group_size=group, **weights)


PACKED = packed(4, 32)
CASES: dict[str, tuple[dict[str, Any], Quantize]] = {
    "awq": (AWQ, awq(32)),
    "awq-row": ({**AWQ, "group_size": -1, "modules_to_not_convert": ["lm_head"]}, awq(-1)),
    "gptq": (GPTQ, gptq(4, 32, True, False)),
    "gptq-row": ({**GPTQ, "group_size": -1}, gptq(4, -1, True, False)),
    "gptq-zeros": ({**GPTQ, "sym": False, "group_size": 64}, gptq(4, 64, False, False)),
    "gptq-order": ({**GPTQ, "desc_act": True}, gptq(4, 32, True, True)),
    "gptq-order-zeros": ({**GPTQ, "desc_act": True, "sym": False}, gptq(4, 32, False, True)),
    "gptq-v2": ({**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, gptq(4, 32, False, False, True)),
    "gptq8": ({**GPTQ, "bits": 8}, gptq(8, 32, True, False)),
    "gptq8-order-zeros": ({**GPTQ, "bits": 8, "desc_act": True, "sym": False}, gptq(8, 32, False, True)),
    "fp8": (FP8, float8((48, 32), "weight_scale_inv")),
    "fp8-bfloat16-scales": (FP8, float8((48, 32), "weight_scale_inv", torch.bfloat16)),
    "compressed-channel": (compressed("channel"), float8("channel", "weight_scale")),
    "compressed-tensor": (compressed("tensor"), float8("tensor", "weight_scale")),
    "compressed-block": (compressed("block", block_structure=[32, 32]), float8((32, 32), "weight_scale")),
    "fp8-tensor": (
        {**FP8, "activation_scheme": "static", "weight_block_size": None},
        float8("tensor", "weight_scale_inv"),
    ),
    "packed": (PACKED, compressed_integers(4, 32, True, True)),
    "packed-zeros": (packed(4, 64, symmetric=False), compressed_integers(4, 64, False, True)),
    "packed-zeros8": (packed(8, 32, symmetric=False), compressed_integers(8, 32, False, True)),
    "packed-order": (packed(4, 32, actorder="group"), compressed_integers(4, 32, True, True, True)),
    "packed-order-by-its-other-name": (
        packed(4, 32, actorder="dynamic"),
        compressed_integers(4, 32, True, True, True),
    ),
    "packed8-row": (compressed("channel", "pack-quantized", type="int"), compressed_integers(8, -1, True, True)),
    "bytes": (compressed("channel", "int-quantized", type="int"), compressed_integers(8, -1, True, False)),
    "bytes-zeros": (
        compressed("channel", "int-quantized", type="int", symmetric=False),
        compressed_integers(8, -1, False, False),
    ),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=() if dtype == torch.float32 or number % 4 == 0 else pytest.mark.long)
        for number, case in enumerate(CASES)
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_logits_are_those_of_the_values(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    """A prefill, then decodes beside another sequence: as near as rounding the activations allows."""
    settings, quantize = CASES[case]
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", settings, quantize)
    steps = [{0: tokens(20), 1: tokens(7, 2)}, {0: [5], 1: [9]}, {1: [4]}]
    results = []
    for path in (tmp_path / "plain", tmp_path / "quantized"):
        model, config = load(path, dtype)
        paged = PagedModel(model, config, dtype, CpuBackend)
        results.append(torch.cat([paged.logits(step) for step in steps]))
    expected, found = results
    error = (found - expected).norm() / expected.norm()
    assert error < (1e-3 if dtype == torch.float32 else 0.05) and expected.norm() > 1


@pytest.mark.parametrize("case", CASES)
def test_weights_have_the_values_of_the_checkpoint(tmp_path: Path, case: str) -> None:
    """The products of an identity matrix are the weights, whatever rounding there is for other activations."""
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", *CASES[case])
    expected, found = (list(matrices(load(tmp_path / name)[0])) for name in ("plain", "quantized"))
    for plain, quantized in zip(expected, found, strict=True):
        torch.testing.assert_close(quantized, plain, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(("case", "error"), [("fp8", 1e-5), ("bytes", 1e-3)])
def test_latent_attention(tmp_path: Path, case: str, error: float) -> None:
    """The matrix from latents to heads is expanded, whatever the form is."""
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", *CASES[case], FAMILIES["deepseek-v3"])
    expected, found = (PagedModel(*load(tmp_path / name)).logits({0: tokens(20)}) for name in ("plain", "quantized"))
    assert (found - expected).norm() < error * expected.norm()


@pytest.mark.parametrize("case", ["awq", "gptq-order-zeros", "packed-order", "bytes-zeros"])
def test_expanded_integers(tmp_path: Path, case: str) -> None:
    """As on a GPU, where groups are of a size that its kernel does not read, or numbers of float32."""
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", *CASES[case])
    expected, found = (list(matrices(load(tmp_path / name, expand=True)[0])) for name in ("plain", "quantized"))
    for plain, quantized in zip(expected, found, strict=True):
        torch.testing.assert_close(quantized, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", ["awq", "gptq-order", "fp8", "packed-zeros", "bytes"])
def test_matrices_that_are_not_quantized(tmp_path: Path, case: str) -> None:
    """The tensors say which they are. A product of several holds integers if all of them do."""
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", *CASES[case])
    file = tmp_path / "quantized" / "model.safetensors"
    stored, values = load_file(file), load_file(tmp_path / "plain" / "model.safetensors")
    for module in ("layers.0.self_attn.k_proj", "layers.1.self_attn.o_proj", "layers.2.mlp.up_proj"):
        stored = {name: tensor for name, tensor in stored.items() if not name.startswith(f"model.{module}.")}
        stored[f"model.{module}.weight"] = values[f"model.{module}.weight"]
    save_file(stored, file)
    model, _ = load(tmp_path / "quantized")
    expected = list(matrices(load(tmp_path / "plain")[0]))
    for plain, quantized in zip(expected, matrices(model), strict=True):
        torch.testing.assert_close(quantized, plain, rtol=2e-6, atol=2e-7)
    held = [layer.attention.qkv.weight.scales is not None for layer in model.layers]
    assert held == [False, case != "fp8", case != "fp8"]


def test_scales_of_activations_are_not_read(tmp_path: Path) -> None:
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", *CASES["fp8-tensor"])
    file = tmp_path / "quantized" / "model.safetensors"
    stored, expected = load_file(file), PagedModel(*load(tmp_path / "quantized")).logits({0: tokens(5)})
    names = [f"model.layers.0.{name}" for name in ("mlp.up_proj.activation_scale", "self_attn.kv_scale")]
    save_file(stored | {name: torch.ones(()) for name in names}, file)
    assert torch.equal(PagedModel(*load(tmp_path / "quantized")).logits({0: tokens(5)}), expected)
    save_file(stored | {"model.layers.0.mlp.up_proj.other_scale": torch.ones(())}, file)
    with pytest.raises(CheckpointError, match=r"has unknown model.layers.0.mlp.up_proj.other_scale"):
        load(tmp_path / "quantized")


def matrices(model: Decoder, device: str = "cpu") -> Iterator[torch.Tensor]:
    for layer in model.layers:
        assert isinstance(layer.mlp, GatedMLP)
        for part in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
            dtype = part.weight.tensor.dtype
            yield part.weight.multiply(torch.eye(part.weight.in_features, dtype=dtype, device=device))


def test_integers_stay_integers(tmp_path: Path) -> None:
    """No matrix is expanded; the head, which is not quantized, keeps its dtype."""
    for case, dtype in (("awq", torch.int32), ("gptq-order-zeros", torch.int32), ("gptq8", torch.int8)):
        quantize_checkpoint(tmp_path / f"{case}-plain", tmp_path / case, *CASES[case])
        model, _ = load(tmp_path / case, torch.bfloat16)
        for layer in model.layers:
            for part in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
                assert part.weight.packed is not None and part.weight.packed.dtype == dtype
                assert part.weight.tensor.numel() == 0
        assert model.lm_head.weight.packed is not None and model.lm_head.weight.packed.dtype == torch.bfloat16


@pytest.mark.parametrize("case", ["awq", "gptq-order-zeros", "gptq8-order-zeros"])
def test_a_token_has_the_same_bits_beside_others(tmp_path: Path, case: str) -> None:
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", *CASES[case])
    model, config = load(tmp_path / "quantized", torch.bfloat16)

    def last(mates: bool) -> torch.Tensor:
        paged = PagedModel(model, config, torch.bfloat16, CpuBackend)
        paged.logits({0: tokens(20), **({1: tokens(13, 2)} if mates else {})})
        return paged.logits({0: [5], **({1: [9], 2: tokens(30, 3)} if mates else {})})[0]

    assert torch.equal(last(False), last(True))


def on_two_ranks(path: Path, token_ids: list[int]) -> list[torch.Tensor]:
    barrier, board = threading.Barrier(2), [torch.empty(0)] * 2

    def run(rank: int) -> torch.Tensor:
        return PagedModel(*load(path, shard=ThreadShard(rank, barrier, board))).logits({0: token_ids})

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.mark.parametrize(
    "case", ["awq", "awq-row", "gptq8", "gptq-row", "fp8", "compressed-channel", "packed-zeros8", "bytes-zeros"]
)
def test_two_ranks_equal_one(tmp_path: Path, case: str) -> None:
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", *CASES[case])
    expected = PagedModel(*load(tmp_path / "quantized")).logits({0: tokens(20)})
    for logits in on_two_ranks(tmp_path / "quantized", tokens(20)):
        assert (logits - expected).norm() < 1e-3 * expected.norm()


def test_ranks_that_cannot_share_a_matrix(tmp_path: Path) -> None:
    for case, error, message in (
        ("gptq-order", CheckpointError, "o_proj: its columns are in the order of desc_act, .* tensor_parallel_size=1"),
        ("packed-order", CheckpointError, "o_proj: its columns are in the order of desc_act"),
        ("gptq-zeros", ConfigError, "have 32 weights, and the checkpoint's groups of 64 do not divide them"),
    ):
        quantize_checkpoint(tmp_path / f"{case}-plain", tmp_path / case, *CASES[case])
        with pytest.raises(error, match=message):
            load(tmp_path / case, shard=ThreadShard(0, threading.Barrier(2), []))


def test_an_engine_runs_a_quantized_checkpoint(tmp_path: Path) -> None:
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", *CASES["awq"])
    options = {"dtype": "float32", "num_gpu_blocks_override": 8, "block_size": 16}
    greedy = SamplingParams(temperature=0, max_tokens=12)
    texts = [
        LLM(path, **options, **more).generate([tokens(20)], greedy, use_tqdm=False)[0].outputs[0].token_ids
        for path, more in (
            (tmp_path / "plain", {}),
            (tmp_path / "quantized", {}),
            (tmp_path / "quantized", {"quantization": "dtype"}),
        )
    ]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 12
    with pytest.raises(ConfigError, match="quantization='int8' makes weights .* is quantized already: leave it out"):
        LLM(tmp_path / "quantized", quantization="int8", **options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes': kvllm computes awq, gptq, fp8, compressed"),
        ({}, "quantized by None"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv', and kvllm computes 'gemm'"),
        ({**AWQ, "bits": 3}, "bits is 3, and kvllm computes 4"),
        ({**AWQ, "zero_point": False}, "zero_point is False"),
        ({**AWQ, "group_size": 12}, "group_size is 12, and kvllm computes -1, or a multiple of 8"),
        ({**AWQ, "group_size": 48}, "weights of 4 bits in groups of 48 need multiples of 8 and of 48"),
        ({**GPTQ, "bits": 2}, "bits is 2, and kvllm computes 4 or 8"),
        ({**GPTQ, "bits": "4"}, "Expected `int`, got `str`"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', and kvllm computes 'gptq' or"),
        ({**GPTQ, "rotation": "hadamard"}, "rotation is 'hadamard', and kvllm computes None"),
        ({**GPTQ, "dynamic": {"-:.*": {}, "+:.*mlp": {"bits": 8}}}, "dynamic is '\\+:.*mlp'"),
        ({**FP8, "weight_scale_semantics": "inverse"}, "weight_scale_semantics is 'inverse', and kvllm computes None"),
        ({**FP8, "weight_block_size": [0, 128]}, "the size of a block is \\(0, 128\\)"),
        (compressed("group", "nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'"),
        (compressed("group"), "strategy is 'group', and kvllm computes 'tensor' or 'channel' or 'block'"),
        (packed(3, 32), "num_bits is 3, and kvllm computes 4 or 8"),
        (packed(4, 12), "group_size is 12"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", *CASES["awq"])
    edit(tmp_path / "quantized", quantization_config=settings)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "quantized")


def test_tensors_that_contradict_the_config(tmp_path: Path) -> None:
    quantize_checkpoint(tmp_path / "plain", tmp_path / "zeros", GPTQ, gptq(4, 32, False, False))
    with pytest.raises(CheckpointError, match="q_proj: its zero points are not 8, but .* sym=true"):
        load(tmp_path / "zeros")
    path = tmp_path / "order"
    quantize_checkpoint(tmp_path / "plain", path, *CASES["gptq-order"])
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.g_idx"
    save_file({**tensors, name: tensors[name].flip(0)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="one input have their columns in different orders"):
        load(path)
    save_file({**tensors, name: tensors[name] * 0}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="k_proj: g_idx has groups that are not of 32 columns each"):
        load(path)
    save_file({key: value for key, value in tensors.items() if key != name}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="lacks model.layers.1.self_attn.k_proj.g_idx"):
        load(path)


@pytest.mark.parametrize("case", [None, "gptq", "awq", "fp8", "compressed-channel"])
def test_biases_of_zeros_are_ignored(tmp_path: Path, case: str | None) -> None:
    """As AutoGPTQ writes them for all projections of Llama. A bias that is not zero is refused by its name."""
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", *CASES[case or "gptq"])
    path = tmp_path / ("quantized" if case else "plain")
    expected = PagedModel(*load(path)).logits({0: tokens(5)})
    file = path / "model.safetensors"
    tensors, plain = load_file(file), load_file(tmp_path / "plain" / "model.safetensors")
    rows = {name.removesuffix(".weight"): len(matrix) for name, matrix in plain.items() if matrix.dim() == 2}
    biases = {f"{module}.bias": torch.zeros(n, dtype=torch.float16) for module, n in rows.items()}
    assert len(biases) == 7 * 3 + 2  # those of the embedding and of the head, too
    save_file({**tensors, **biases}, file)
    assert torch.equal(PagedModel(*load(path)).logits({0: tokens(5)}), expected)
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.down_proj.bias"):
        save_file({**tensors, **biases, name: biases[name] + 1e-3}, file)
        with pytest.raises(CheckpointError, match=f"has unknown {name}$"):
            load(path)
    save_file({**tensors, "model.layers.0.self_attn.other_proj.bias": torch.zeros(64)}, file)
    with pytest.raises(CheckpointError, match="has unknown model.layers.0.self_attn.other_proj.bias"):
        load(path)


def test_a_bias_that_the_model_has_may_be_zero(tmp_path: Path) -> None:
    """Qwen2 has one of queries, keys and values; AutoGPTQ writes zeros for the others."""
    path = tmp_path / "quantized"
    quantize_checkpoint(tmp_path / "plain", path, *CASES["gptq"], {**QWEN3, "family": "qwen2"})
    expected = PagedModel(*load(path)).logits({0: tokens(5)})
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}, path / "model.safetensors")
    assert torch.equal(PagedModel(*load(path)).logits({0: tokens(5)}), expected)
    name = "model.layers.0.self_attn.q_proj.bias"
    save_file({**tensors, name: tensors[name] * 0}, path / "model.safetensors")
    assert not torch.equal(PagedModel(*load(path)).logits({0: tokens(5)}), expected)


def products_on_a_gpu() -> None:
    """Print how many matrices of integers each case has, and the largest relative error of their products with 1."""
    from tests.helpers.cuda_stand_in import stand_in

    found = {}
    for case in ("awq", "gptq8-order-zeros"):
        with TemporaryDirectory() as directory, stand_in():
            plain, quantized = Path(directory) / "plain", Path(directory) / "quantized"
            quantize_checkpoint(plain, quantized, *CASES[case])
            config = load_model_config(quantized)
            model = load_model(quantized, config, SingleRank(), torch.float16, torch.device("cuda"), 64)
            check_integers(quantized_matrices(model.weights()), torch.float16)
            pairs = zip(matrices(model, "cuda"), matrices(load(plain)[0]), strict=True)
            errors = [((one.cpu().float() - other).norm() / other.norm()).item() for one, other in pairs]
            found[case] = len(quantized_matrices(model.weights())), max(errors)
            if case == "awq":
                wide = load_model(quantized, config, SingleRank(), torch.float32, torch.device("cuda"), 64)
                assert quantized_matrices(wide.weights()) == []
                for one, other in zip(matrices(wide, "cuda"), matrices(load(plain)[0]), strict=True):
                    torch.testing.assert_close(one.cpu(), other, rtol=2e-6, atol=2e-7)
                with patch("kvllm.models.quantized_matrix.HALF", 32), pytest.raises(ConfigError) as error:
                    check_integers(quantized_matrices(model.weights()), torch.float16)
                found["error"] = str(error.value)
    print(json.dumps(found))


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")
def test_integers_on_a_gpu() -> None:
    """In Triton's interpreter: they stay integers, and a start finds it if they are read in another way."""
    found = run_python("products_on_a_gpu()", __name__, TRITON_INTERPRET="1")
    message = found.pop("error")
    assert message.startswith("Triton's products with integers are wrong on this device (relative error ")
    assert all(count == 12 and error < 1e-3 for count, error in found.values()), found


def test_random_weights_are_not_quantized(tmp_path: Path) -> None:
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", *CASES["awq"])
    config = load_model_config(tmp_path / "quantized")
    with pytest.raises(ConfigError, match='load_format="dummy" makes no quantized weights'):
        random_model(config, SingleRank(), torch.float32, CPU, 64, 0)
