"""Models against transformers, over kvllm's own paged cache."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from kvllm.attention.reference import ReferenceBackend
from kvllm.attention.registry import make_backend
from kvllm.errors import ConfigError
from kvllm.models.config import load_model_config
from kvllm.models.layers import QKVLinear
from kvllm.models.loader import random_model
from kvllm.models.weights import LinearWeight, Packing
from kvllm.parallel import SingleRank, kv_heads, split
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.families import FAMILIES
from tests.helpers.paged_model import PagedModel, load, tokens
from tests.helpers.thread_shard import ThreadShard

ORDERED_FLOAT32 = pytest.param(
    torch.float32,
    marks=pytest.mark.skipif(
        torch.__version__ < "2.13", reason="the order of float32 sums depends on the number of rows in older oneDNN"
    ),
)

CPU = torch.device("cpu")


OF_EACH_FAMILY = {options["family"]: name for name, options in reversed(FAMILIES.items())}.values()


def usual(*others: str) -> list[Any]:
    """One checkpoint of each family, and others, by default; all with `--long`."""
    chosen = {*OF_EACH_FAMILY, *others}
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.long) for name in FAMILIES]


class RecordingBackend(ReferenceBackend):
    """Keeps the queries of every run."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.queries: dict[int, list[torch.Tensor]] = {}

    def run(self, layer: int, queries: torch.Tensor, plan: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
        self.queries.setdefault(layer, []).append(queries.clone())
        return super().run(layer, queries, plan, sinks)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp(request.param)
    return path, make_checkpoint(path, **FAMILIES[request.param])


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.long), "auto"])
def test_logits_equal_transformers(checkpoint: tuple[Path, torch.nn.Module], backend: str) -> None:
    """Two sequences: a prefill in two chunks, then decodes, one of them beside the other's prefill."""
    path, theirs = checkpoint
    model, config = load(path)
    paged = PagedModel(model, config, backend=lambda *args: make_backend(backend, *args))
    first, second = tokens(40, seed=1), tokens(30, seed=2)
    ours: dict[int, list[torch.Tensor]] = {0: [], 2: []}
    for step in (
        {0: first[:21]},
        {0: first[21:34], 2: second[:9]},
        {2: second[9:27], 0: first[34:35]},
        *({0: first[i : i + 1], 2: second[i - 8 : i - 7]} for i in range(35, 38)),
        *({0: first[i : i + 1]} for i in range(38, 40)),
    ):
        parts = paged.logits(step).split([len(chunk) for chunk in step.values()])
        for sequence, part in zip(step, parts, strict=True):
            ours[sequence].append(part)
    for sequence, token_ids in ((0, first), (2, second)):
        with torch.inference_mode():
            expected = theirs(torch.tensor([token_ids])).logits[0]
        found = torch.cat(ours[sequence])
        assert found.dtype == torch.float32
        assert expected.std() > 0.5
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("checkpoint", usual("mistral-window"), indirect=True, scope="module")
def test_recomputed_queries_are_those_of_the_forward_pass(checkpoint: tuple[Path, torch.nn.Module]) -> None:
    model, config = load(checkpoint[0])
    if config.recurrent:
        pytest.skip("beside recurrent layers, which have no state of earlier tokens, no query is computed again")
    paged = PagedModel(model, config, backend=RecordingBackend)
    token_ids = tokens(30)
    for step in (token_ids[:17], *([token] for token in token_ids[17:])):
        paged.forward({1: step})
    cache = paged.cache.data.clone()
    runs = {layer: len(parts) // 14 for layer, parts in paged.backend.queries.items()}  # layers may share KV pairs
    then = {layer: torch.cat(parts[:: runs[layer]]) for layer, parts in paged.backend.queries.items()}
    rows = [*range(8, 24, 3), 24, 25, 26, 27]
    now: dict[int, torch.Tensor] = {}
    model.recompute_queries(
        torch.tensor(token_ids)[rows],
        torch.tensor(rows),
        paged.context(paged.plan({1: len(rows)}, rows)),
        now.__setitem__,
    )
    assert list(now) == list(range(config.num_layers))
    for layer, queries in now.items():
        torch.testing.assert_close(queries, then[layer][rows], atol=1e-5, rtol=1e-5)
    assert torch.equal(paged.cache.data.view(torch.int32), cache.view(torch.int32))
    last = config.num_layers - 1
    assert len(paged.backend.queries[last]) == 14 * runs[last], "attention ran in the last layer"


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "cohere2"])
@pytest.mark.parametrize("dtype", [ORDERED_FLOAT32, torch.bfloat16])
def test_batch_mates_do_not_change_a_token(tmp_path: Path, dtype: torch.dtype, family: str) -> None:
    """Bit for bit, with sums longer than oneDNN treats alike for one row and for several."""
    make_checkpoint(tmp_path, family, hidden_size=1152, intermediate_size=1600, num_hidden_layers=2, head_dim=160)
    model, config = load(tmp_path, dtype)
    token_ids, others = tokens(24), tokens(30, seed=2)

    def steps(mates: bool) -> torch.Tensor:
        paged = PagedModel(model, config, dtype, backend=lambda *args: make_backend("cpu", *args))
        rows = [paged.logits({0: token_ids[:20], **({1: others[:13], 2: others} if mates else {})})[:20]]
        for i in range(20, 24):
            rows.append(paged.logits({0: token_ids[i : i + 1], **({1: others[i - 7 : i - 6]} if mates else {})})[:1])
        return torch.cat(rows)

    alone = steps(False)
    assert alone.isfinite().all()
    assert torch.equal(alone, steps(True))


def all_rows(weight: LinearWeight) -> torch.Tensor:
    return weight.rows(torch.arange(weight.out_features))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "width"), [(72, 40), (513, 512), (64, 1024), (7, 1026), (1000, 3072)])
def test_packed_product(dtype: torch.dtype, columns: int, width: int) -> None:
    """Close to the exact product, and the same bits whatever other rows there are."""
    torch.manual_seed(0)
    matrix, bias, x = (torch.randn(shape).to(dtype) for shape in ((columns, width), (columns,), (100, width)))
    weight = LinearWeight.pack(matrix, Packing())
    assert weight.tensor.numel() == 0
    exact = x.double() @ matrix.double().T + bias.double()
    together = weight.multiply(x, bias)
    assert together.dtype == dtype
    torch.testing.assert_close(together.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 17, 33, 49):
        assert torch.equal(weight.multiply(x[5 : 5 + rows], bias), together[5 : 5 + rows])
    assert weight.multiply(x[:0]).shape == (0, columns)


@pytest.mark.parametrize("count", [16, 21])
def test_rows_of_a_packed_weight(count: int) -> None:
    matrix, x = torch.randn(50, 24), torch.randn(3, 24)
    weight = LinearWeight.pack(matrix, Packing())
    indices = torch.tensor([0, 49, 17, 17])
    assert torch.equal(weight.rows(indices), matrix[indices])
    assert torch.equal(weight.part(0, count).multiply(x), weight.multiply(x)[:, :count])
    assert torch.equal(weight.part(0, count).rows(indices[:1]), matrix[:1])
    with pytest.raises(RuntimeError, match="row 64 is not among the 64 rows"):
        weight.rows(torch.tensor([64]))


@pytest.mark.parametrize("packed", [False, True])
def test_query_projection_is_a_part_of_the_merged_one(tmp_path: Path, packed: bool) -> None:
    make_checkpoint(tmp_path, "qwen2")
    config = load_model_config(tmp_path)
    torch.manual_seed(0)
    qkv = QKVLinear(config, SingleRank(), torch.float32, CPU)
    qkv.weight.allocate(Packing() if packed else None)
    qkv.weight.write(0, torch.randn(qkv.weight.out_features, config.hidden_size))
    qkv.bias.normal_()
    x = torch.randn(7, config.hidden_size)
    queries = qkv.forward_queries(x)
    assert queries.shape == (7, config.num_query_heads * config.head_dim)
    torch.testing.assert_close(queries, qkv.forward(x)[:, : queries.shape[1]])


@pytest.mark.parametrize("family", usual("llama-biases", "llama-mha-head-dim"))
def test_two_ranks_equal_one(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, **FAMILIES[family])
    assert_two_ranks_equal_one(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3-tied-sharded"])
def test_two_ranks_share_an_odd_vocabulary(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, **FAMILIES[family], vocab_size=257)
    assert_two_ranks_equal_one(tmp_path)


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_two_ranks_with_the_same_head(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family, num_key_value_heads=1)
    assert_two_ranks_equal_one(tmp_path)


def assert_two_ranks_equal_one(path: Path) -> None:
    token_ids = tokens(25)
    expected = PagedModel(*load(path)).logits({0: token_ids})
    barrier, board = threading.Barrier(2), [torch.empty(0)] * 2
    found: list[torch.Tensor | None] = [None, None]

    def run(rank: int) -> None:
        model, config = load(path, shard=ThreadShard(rank, barrier, board))
        paged = PagedModel(model, config)
        assert paged.cache.data.shape[3] == max(1, config.num_kv_heads // 2)
        found[rank] = torch.cat([paged.logits({0: token_ids[:20]}), paged.logits({0: token_ids[20:]})])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for logits in found:
        assert logits is not None
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_small_vocabulary_on_many_ranks(tmp_path: Path, tied: bool) -> None:
    """Five tokens, two for each of four ranks: the third has one, the last has none."""
    theirs = make_checkpoint(tmp_path, "qwen3", head_dim=16, vocab_size=5, tie_word_embeddings=tied)
    models = [load(tmp_path, shard=ThreadShard(rank, threading.Barrier(4), []))[0] for rank in range(4)]
    for found, expected in (("embedding", theirs.model.embed_tokens.weight), ("lm_head", theirs.lm_head.weight)):
        weights = [getattr(model, found).weight for model in models]
        rows = torch.cat([all_rows(weight) for weight in weights])
        assert torch.equal(rows, torch.cat((expected, torch.zeros(3, 64))))
    config = load_model_config(tmp_path)
    last = random_model(config, ThreadShard(3, threading.Barrier(4), []), torch.float32, CPU, 64, 7)
    assert not all_rows(last.embedding.weight).any()


def test_random_model_is_the_same_on_any_number_of_ranks(qwen3: Path) -> None:
    config = load_model_config(qwen3)
    args = (torch.bfloat16, CPU, 64, 7)
    whole = random_model(config, SingleRank(), *args).layers[1]
    barrier = threading.Barrier(2)
    parts = [random_model(config, ThreadShard(rank, barrier, []), *args).layers[1] for rank in range(2)]
    assert torch.equal(torch.cat([all_rows(p.mlp.down.weight) for p in parts], 1), all_rows(whole.mlp.down.weight))
    rows = all_rows(whole.attention.qkv.weight).split(whole.attention.qkv.sizes)
    halves = [all_rows(part.attention.qkv.weight).split(part.attention.qkv.sizes) for part in parts]
    for i, expected in enumerate(rows):
        assert torch.equal(torch.cat([half[i] for half in halves]), expected)
    assert 0.015 < rows[0].float().std() < 0.025


def test_ranks_that_do_not_divide_the_model(qwen3: Path) -> None:
    ranks = ThreadShard(0, threading.Barrier(3), [])
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide the model's 8 query heads"):
        load(qwen3, shard=ranks)
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide the model's 2 KV heads: use one"):
        kv_heads(2, ranks)
    with pytest.raises(ConfigError, match="7 whatever"):
        split(7, ranks, "whatever")
    assert split(6, ranks, "whatever") == 2


def generate(paged: PagedModel, bos: int, count: int) -> list[int]:
    token_ids = [bos]
    for _ in range(count):
        token_ids.append(int(paged.logits({0: token_ids[-1:]}).argmax()))
    return token_ids


@pytest.mark.parametrize("name, dtype", [("stories260K-fp32", torch.float32), ("stories260K-hd64", torch.bfloat16)])
def test_a_trained_model_tells_its_story(shared_dir: Path, name: str, dtype: torch.dtype) -> None:
    path = shared_dir / "data" / "models" / name
    if not path.is_dir():
        pytest.skip(f"needs the trained model {path}, which is absent")
    model, config = load(path, dtype)
    paged = PagedModel(model, config, dtype, backend=lambda *args: make_backend("cpu", *args))
    token_ids = generate(paged, config.bos_token_id, 30)
    text = Tokenizer.from_file(str(path / "tokenizer.json")).decode(token_ids)
    assert text.strip().startswith("Once upon a time, there was a little girl named Lily.")
    if dtype == torch.float32:
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        with torch.inference_mode():
            expected = theirs(torch.tensor([token_ids[:-1]])).logits[0]
        found = PagedModel(model, config).logits({0: token_ids[:-1]})
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
