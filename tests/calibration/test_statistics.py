"""The file of a model's query statistics: what is in it, what a rank reads of it, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvllm import LLM, CheckpointError, CompressionConfig, SamplingParams
from kvllm.calibration.dense import DenseModel
from kvllm.calibration.query_statistics import query_statistics
from kvllm.compression.specs import STATISTICS_FILE
from kvllm.compression.statistics import read_statistics, write_statistics
from kvllm.models.config import load_model_config
from kvllm.parallel import KVHeads
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressions import paper_compression
from tests.helpers.dense_decoder import DenseDecoder
from tests.helpers.engines import random_token_ids

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(path, request.param, head_dim=16)
    return path


def test_statistics_are_those_of_dense_queries_before_their_rotation(checkpoint: Path) -> None:
    """Two pieces of different lengths."""
    pieces = random_token_ids(50, 37)
    write_statistics(checkpoint, query_statistics(DenseModel(checkpoint, 50), pieces), {})
    found = read_statistics(checkpoint, load_model_config(checkpoint), KVHeads(0, 2, 1), CPU)
    decoder = DenseDecoder(checkpoint)
    for layer in range(decoder.num_layers):
        queries = torch.cat([queries_of(decoder, piece)[layer][:, 4:] for piece in pieces], dim=1)
        of_layer = found.of_layers(range(layer, layer + 1))
        close = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
        torch.testing.assert_close(of_layer.mean[0], queries.mean(dim=1), **close)
        torch.testing.assert_close(of_layer.magnitude[0], torch.hypot(*queries.chunk(2, dim=-1)).mean(dim=1), **close)
        covariances = torch.stack([torch.cov(of_head.T, correction=0) for of_head in queries])
        torch.testing.assert_close(of_layer.covariance[0], covariances, **close)


def queries_of(decoder: DenseDecoder, tokens: list[int]) -> list[torch.Tensor]:
    """By layer `[Hq, T, d]`, turned back by their positions."""
    visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril().expand(decoder.num_layers, 2, -1, -1)
    positions = [-position for position in range(len(tokens))]
    return [decoder._rotate(queries, positions) for queries in decoder.forward(tokens, visible).queries]


def test_a_rank_reads_the_query_heads_of_its_kv_heads(checkpoint: Path) -> None:
    """Eight query heads, two KV heads. Replicas of a KV head read the same."""
    model = load_model_config(checkpoint)
    write_statistics(checkpoint, query_statistics(DenseModel(checkpoint, 20), random_token_ids(20)), {})
    whole = load_file(checkpoint / STATISTICS_FILE)
    for heads, of_rank in ((KVHeads(1, 1, 1), slice(4, 8)), (KVHeads(0, 1, 2), slice(0, 4))):
        found = read_statistics(checkpoint, model, heads, CPU)
        for name, tensor in whole.items():
            assert torch.equal(getattr(found, name), tensor[:, of_rank])


def test_a_checkpoint_without_statistics_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", head_dim=16)
    compression = CompressionConfig(method="triattention")

    def refusal() -> str:
        with pytest.raises(CheckpointError) as error:
            LLM(tmp_path, num_gpu_blocks_override=4, compression=compression)
        return str(error.value)

    command = f"kvllm calibrate {tmp_path}"
    assert f"has no {STATISTICS_FILE}, which the compression method needs" in refusal() and command in refusal()
    save_file({"mean": torch.zeros(3, 8, 16)}, tmp_path / STATISTICS_FILE)
    assert "is not of this model" in refusal() and command in refusal()
    (tmp_path / STATISTICS_FILE).write_bytes(b"no such thing")
    assert "cannot be read" in refusal() and command in refusal()
    LLM(tmp_path, num_gpu_blocks_override=4, compression=CompressionConfig(method="expected_attention"))


@pytest.mark.parametrize("method", ["triattention", "expected_attention_calibrated"])
def test_the_model_of_the_package_has_statistics(method: str) -> None:
    compression = paper_compression(method=method, period=8, window_blocks=3, buffer=4)
    llm = LLM(block_size=16, num_gpu_blocks_override=40, compression=compression)
    llm.generate("a", SamplingParams(max_tokens=120, ignore_eos=True), use_tqdm=False)
    assert llm.stats().windows_compressed > 0
