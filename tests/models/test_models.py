"""Models against transformers, over kvllm's own paged cache; the loader against damaged checkpoints."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.context import AttentionContext
from kvllm.attention.reference import ReferenceBackend
from kvllm.attention.registry import make_backend
from kvllm.errors import CheckpointError, ConfigError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.ops.registry import make_operations
from kvllm.models import MODELS
from kvllm.models.config import ARCHITECTURES, ModelConfig, load_model_config
from kvllm.models.layers import QKVLinear, linear, pack, rotary_table
from kvllm.models.llama import LlamaModel
from kvllm.models.loader import load_model, random_model
from kvllm.parallel import Shard, SingleRank, kv_heads, split
from tests.helpers.checkpoints import make_checkpoint

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "llama3-rope": {"family": "llama", "rope_parameters": LLAMA3},
    "llama-linear-rope-sharded": {"family": "llama", "rope_parameters": LINEAR, "sharded": True},
    "llama-mha-head-dim": {"family": "llama", "num_key_value_heads": 8, "head_dim": 32},
    "mistral": {"family": "mistral", "sliding_window": None},
    "qwen2": {"family": "qwen2"},
    "qwen2-tied-sharded": {"family": "qwen2", "tie_word_embeddings": True, "sharded": True},
    "qwen3": {"family": "qwen3", "head_dim": 16},
    "qwen3-tied-sharded": {"family": "qwen3", "head_dim": 16, "tie_word_embeddings": True, "sharded": True},
}


class PagedModel:
    """A model with a cache for a few sequences of up to 64 tokens, in blocks of 4 that are strewn over the pool."""

    def __init__(
        self,
        model: LlamaModel,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        backend: Callable[..., AttentionBackend] = ReferenceBackend,
    ) -> None:
        self.model = model
        shape = CacheShape(config.num_layers, model.num_kv_heads, config.head_dim, 4, dtype)
        self.cache = PagedKVCache(shape, num_blocks=48)
        self.cache.data.fill_(float("nan"))
        self.backend = backend(self.cache, model.num_query_heads, config.head_dim**-0.5)
        self.operations = make_operations(self.cache)
        self.tables = torch.randperm(48, generator=torch.Generator().manual_seed(0)).view(3, 16)
        self.lengths = [0, 0, 0]

    def forward(self, chunks: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Compute the next tokens of some sequences in one step: hidden states of all rows."""
        index = [self.lengths[s] + i for s, tokens in chunks.items() for i in range(len(tokens))]
        row_tables = torch.cat([self.tables[s].expand(len(tokens), -1) for s, tokens in chunks.items()])
        positions = torch.tensor(index)
        slots = row_tables.gather(1, positions[:, None] // 4)[:, 0] * 4 + positions % 4
        plan = self.plan({s: len(tokens) for s, tokens in chunks.items()}, index)
        for sequence, tokens in chunks.items():
            self.lengths[sequence] += len(tokens)
        token_ids = torch.tensor([token for tokens in chunks.values() for token in tokens])
        return self.model.forward(token_ids, positions, self.context(plan, slots))

    def context(self, plan: Any, slot_mapping: torch.Tensor | None = None) -> AttentionContext:
        return AttentionContext(self.backend, self.operations, plan, slot_mapping)

    def plan(self, num_rows: dict[int, int], index: list[int]) -> Any:
        starts = torch.tensor([0, *num_rows.values()]).cumsum(0)
        tables = self.tables[list(num_rows)]
        return self.backend.plan(AttentionBatch(starts.int(), torch.tensor(index).int(), tables.int()))

    def logits(self, chunks: Mapping[int, Sequence[int]]) -> torch.Tensor:
        return self.model.logits(self.forward(chunks))


class RecordingBackend(ReferenceBackend):
    """Keeps the queries of every run."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.queries: dict[int, list[torch.Tensor]] = {}

    def run(self, layer: int, queries: torch.Tensor, plan: Any) -> torch.Tensor:
        self.queries.setdefault(layer, []).append(queries.clone())
        return super().run(layer, queries, plan)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The matrices are tiny: waking a second thread takes longer than the products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(path: Path, dtype: torch.dtype = torch.float32, shard: Shard | None = None) -> tuple[LlamaModel, ModelConfig]:
    config = load_model_config(path)
    return load_model(path, config, shard or SingleRank(), dtype, CPU, config.max_position_embeddings), config


def tokens(length: int, seed: int = 1, vocab_size: int = 256) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp(request.param)
    return path, make_checkpoint(path, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(path, "qwen3", head_dim=16)
    return path


@pytest.mark.parametrize("backend", ["reference", "cpu"])
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


def test_recomputed_queries_are_those_of_the_forward_pass(checkpoint: tuple[Path, torch.nn.Module]) -> None:
    model, config = load(checkpoint[0])
    paged = PagedModel(model, config, backend=RecordingBackend)
    token_ids = tokens(30)
    for step in (token_ids[:17], *([token] for token in token_ids[17:])):
        paged.forward({1: step})
    cache = paged.cache.data.clone()
    then = {layer: torch.cat(parts) for layer, parts in paged.backend.queries.items()}
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
    assert len(paged.backend.queries[config.num_layers - 1]) == 14, "attention ran in the last layer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_mates_do_not_change_a_row(tmp_path: Path, dtype: torch.dtype) -> None:
    """Bit for bit, with sums longer than oneDNN treats alike for one row and for several."""
    make_checkpoint(tmp_path, "qwen3", hidden_size=1152, intermediate_size=1600, num_hidden_layers=2, head_dim=160)
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


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widened", [False, True], ids=["as it is", "widened"])
@pytest.mark.parametrize("width", [40, 512, 1024, 1025, 3072])
def test_packed_product(dtype: torch.dtype, widened: bool, width: int) -> None:
    """widened: as `pack` does by itself where the CPU has no products of the weight's dtype."""
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(shape).to(dtype) for shape in ((72, width), (72,), (64, width)))
    packed_len = pack(weight.float() if widened else weight)
    assert packed_len.is_mkldnn and linear(x, packed_len, bias).dtype == dtype
    exact = x.double() @ weight.double().T + bias.double()
    together = linear(x, packed_len, bias)
    torch.testing.assert_close(together.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)
    for rows in (1, 2, 3, 8, 17, 33):
        assert torch.equal(linear(x[5 : 5 + rows], packed_len, bias), together[5 : 5 + rows])


@pytest.mark.parametrize("packed_len", [False, True])
def test_query_projection_is_a_part_of_the_merged_one(tmp_path: Path, packed_len: bool) -> None:
    make_checkpoint(tmp_path, "qwen2")
    config = load_model_config(tmp_path)
    torch.manual_seed(0)
    qkv = QKVLinear(config, SingleRank(), torch.float32, CPU)
    qkv.weight.normal_()
    qkv.bias.normal_()
    if packed_len:
        qkv.pack()
    x = torch.randn(7, config.hidden_size)
    queries = qkv.forward_queries(x)
    assert queries.shape == (7, config.num_query_heads * config.head_dim)
    torch.testing.assert_close(queries, qkv.forward(x)[:, : queries.shape[1]])


@pytest.mark.parametrize("options", [{}, {"rope_parameters": LLAMA3}, {"rope_parameters": LINEAR}])
def test_rotations_equal_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = make_checkpoint(tmp_path, "llama", head_dim=64, **options)
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), torch.arange(100_000)[None])
    table = rotary_table(load_model_config(tmp_path), 100_000, CPU)
    torch.testing.assert_close(table, torch.cat((cos[0, :, :32], sin[0, :, :32]), 1), atol=1e-6, rtol=0)


def test_rope_keys_of_older_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", rope_parameters=LLAMA3)
    new = load_model_config(tmp_path)
    old = {key: value for key, value in LLAMA3.items() if key not in ("rope_type", "rope_theta")}
    edit(tmp_path, rope_parameters=..., rope_theta=500, rope_scaling={"type": "llama3", **old})
    edit(tmp_path, dtype=..., torch_dtype="float32")
    assert load_model_config(tmp_path) == new
    edit(tmp_path, rope_scaling=None, torch_dtype="bfloat16", rope_theta=...)
    plain = load_model_config(tmp_path)
    assert (plain.rope_scaling, plain.rope_theta, plain.dtype) == (None, 10000.0, "bfloat16")


class ThreadShard(Shard):
    """One of several ranks that run in threads of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[torch.Tensor]) -> None:
        self.rank = rank
        self.world_size = barrier.parties
        self.barrier = barrier
        self.board = board

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.board[self.rank] = x.clone()
        self.barrier.wait(30)
        parts = list(self.board)
        self.barrier.wait(30)
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum(self._exchange(x)))

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)


@pytest.mark.parametrize(
    ("family", "vocab_size"), [("qwen2", 256), ("qwen2", 257), ("qwen3-tied-sharded", 256), ("qwen3-tied-sharded", 257)]
)
def test_two_ranks_equal_one(tmp_path: Path, family: str, vocab_size: int) -> None:
    make_checkpoint(tmp_path, **FAMILIES[family], vocab_size=vocab_size)
    token_ids = tokens(25)
    expected = PagedModel(*load(tmp_path)).logits({0: token_ids})
    barrier, board = threading.Barrier(2), [torch.empty(0)] * 2
    found: list[torch.Tensor | None] = [None, None]

    def run(rank: int) -> None:
        paged = PagedModel(*load(tmp_path, shard=ThreadShard(rank, barrier, board)))
        assert paged.cache.data.shape[3] == 1
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
        rows = torch.cat([weight.to_dense() if weight.is_mkldnn else weight for weight in weights])
        assert torch.equal(rows, torch.cat((expected, torch.zeros(3, 64))))
    config = load_model_config(tmp_path)
    last = random_model(config, ThreadShard(3, threading.Barrier(4), []), torch.float32, CPU, 64, 7)
    assert not last.embedding.weight.any()


def test_random_model_is_the_same_on_any_number_of_ranks(qwen3: Path) -> None:
    config = load_model_config(qwen3)
    args = (torch.bfloat16, CPU, 64, 7)
    whole = random_model(config, SingleRank(), *args).layers[1]
    barrier = threading.Barrier(2)
    parts = [random_model(config, ThreadShard(rank, barrier, []), *args).layers[1] for rank in range(2)]
    assert torch.equal(torch.cat([p.down.weight.to_dense() for p in parts], 1), whole.down.weight.to_dense())
    rows = whole.qkv.weight.to_dense().split(whole.qkv.sizes)
    halves = [part.qkv.weight.to_dense().split(part.qkv.sizes) for part in parts]
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


def test_every_accepted_architecture_has_a_class() -> None:
    assert set(MODELS) == set(ARCHITECTURES)


def edit(path: Path, **changes: Any) -> None:
    """Change keys of config.json; `...` removes one."""
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    config = {key: value for key, value in config.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "generation, expected",
    [(None, (5,)), ({}, (5,)), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": [7, 5, 9]}, (7, 5, 9))],
)
def test_eos_tokens(tmp_path: Path, qwen3: Path, generation: Any, expected: tuple[int, ...]) -> None:
    shutil.copy(qwen3 / "config.json", tmp_path)
    edit(tmp_path, eos_token_id=5)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_model_config(tmp_path).eos_token_ids == expected
    edit(tmp_path, eos_token_id=[5])
    assert load_model_config(tmp_path).eos_token_ids == expected
    edit(tmp_path, eos_token_id=None)
    assert load_model_config(tmp_path).eos_token_ids == (expected if expected != (5,) else ())


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"architectures": ["FooForCausalLM"]},
            "unsupported architecture FooForCausalLM: kvllm runs .*Qwen3ForCausalLM",
        ),
        ({"architectures": ...}, "none named"),
        ({"hidden_size": ...}, "missing required field `hidden_size`"),
        ({"hidden_size": "64"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, but must be at least 1"),
        ({"num_attention_heads": 7}, "num_attention_heads 7 is not a multiple of num_key_value_heads 2"),
        ({"num_attention_heads": 6, "head_dim": None}, "hidden_size 64 is not a multiple of num_attention_heads 6"),
        ({"head_dim": 15}, "head_dim is 15, but rotary embedding needs a positive even number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' instead of 'silu'"),
        ({"attention_bias": True}, "o_proj too, have a bias"),
        ({"mlp_bias": True}, "MLP projections have a bias"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "window .of 8 tokens"),
        ({"layer_types": ..., "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}, "of 8 tokens"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\), .* use the checkpoint that is not"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "rope type 'yarn': kvllm computes default, linear"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' needs factor, a positive number"),
        (
            {"rope_parameters": {**LLAMA3, "low_freq_factor": 4}},
            "low_freq_factor 4.* must be below high_freq_factor 4.0",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"dtype": "int8"}, "unsupported dtype 'int8': kvllm reads bfloat16, float16, float32"),
    ],
)
def test_refused_configs(tmp_path: Path, qwen3: Path, changes: dict[str, Any], message: str) -> None:
    shutil.copy(qwen3 / "config.json", tmp_path)
    load_model_config(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


def test_missing_and_malformed_configs(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent is not a directory"):
        load_model_config(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="has no config.json"):
        load_model_config(tmp_path)
    for content, message in (("{", "not valid JSON"), ("[]", "Expected `object`"), ("\xff", "not valid JSON")):
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(CheckpointError, match=message):
            load_model_config(tmp_path)


def copy_checkpoint(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy whose tensors were changed in place by `change`."""
    shutil.copy(source / "config.json", target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_tensors_that_do_not_fit(tmp_path: Path, qwen3: Path) -> None:
    up, norm = ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight")

    def change(path: Path, message: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        with pytest.raises(CheckpointError, match=message):
            load(copy_checkpoint(qwen3, path, change))

    change(tmp_path, f"lacks {up}$", lambda tensors: tensors.pop(up))
    change(tmp_path, "has unknown model.extra$", lambda tensors: tensors.update({"model.extra": torch.ones(1)}))
    shape = rf"{up} has shape \(95, 64\), but config.json implies \(96, 64\)"
    change(tmp_path, shape, lambda tensors: tensors.update({up: torch.ones(95, 64)}))
    quantized = f"{norm} has dtype I8; kvllm reads BF16, F16, F32, F64"
    change(tmp_path, quantized, lambda tensors: tensors.update({norm: torch.ones(16, dtype=torch.int8)}))
    many = "lacks model.layers.0.input_layernorm.weight, .* and 28 more"
    change(tmp_path, many, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])


def test_tensors_that_are_not_needed_are_ignored(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_checkpoint(source, "llama", tie_word_embeddings=True)
    target.mkdir()
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(256, 64)}
    copy_checkpoint(source, target, lambda tensors: tensors.update(buffers))
    token_ids = tokens(10)
    expected, found = (PagedModel(*load(path)).logits({0: token_ids}) for path in (source, target))
    assert torch.equal(expected, found)


def test_unreadable_weights(tmp_path: Path, qwen3: Path) -> None:
    shutil.copy(qwen3 / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="no weights: neither model.safetensors nor model.safetensors.index.json"):
        load(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin only. kvllm never loads weights from pickle"):
        load(tmp_path)
    content = (qwen3 / "model.safetensors").read_bytes()
    for damaged in (content[:-100], content[:50], b""):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read .* download it again"):
            load(tmp_path)


def test_incomplete_shards(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", sharded=True)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    last = shards[-1].read_bytes()
    shards[-1].write_bytes(last[:-1])
    with pytest.raises(CheckpointError, match=f"{shards[-1].name} cannot be read"):
        load(tmp_path)
    shards[-1].unlink()
    with pytest.raises(CheckpointError, match=f"names files that are absent, {shards[-1].name}"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not an index of safetensors files"):
        load(tmp_path)


def test_float16_on_the_cpu_is_refused(qwen3: Path) -> None:
    with pytest.raises(ConfigError, match="float16 .* use bfloat16 or float32"):
        load(qwen3, torch.float16)
