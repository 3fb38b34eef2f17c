"""Compression as a whole: what the scheduler plans, the worker selects and the backend moves, against the golden
vectors and against dense attention over what survived.

Every plan goes through a `Recorder`, which keeps account of the survivors on its own, entry by entry. Between steps all
memory that holds no sequence's entry is NaN, so a result that reads it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.attention.base import AttentionBatch
from kvllm.attention.context import AttentionContext
from kvllm.attention.registry import make_backend
from kvllm.config import EngineConfig
from kvllm.core.block_manager import BlockManager
from kvllm.core.protocol import SampledToken, StepPlan, StepResult
from kvllm.core.scheduler import Scheduler
from kvllm.core.sequence import Sequence
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.ops.registry import make_operations
from kvllm.models.base import build_decoder
from kvllm.models.config import ModelConfig
from kvllm.models.elementwise import rotary
from kvllm.models.layers import LMHead, VocabEmbedding
from kvllm.models.rope import Rope
from kvllm.models.rotary import rotary_table
from kvllm.models.weights import Packing
from kvllm.parallel import SingleRank
from kvllm.stats import EngineStats
from kvllm.worker.model_runner import ModelRunner
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressions import paper_compression
from tests.helpers.dense_decoder import DenseDecoder, DensePass
from tests.helpers.engines import random_token_ids
from tests.helpers.literal_kara import dense_scores, literal_token2chunk
from tests.helpers.recorder import Event, Recorder, assert_dense, block_table_of, kv_pairs_of, poison

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])
CPU = torch.device("cpu")


# Keeping account


# The golden vectors, through the scheduler and the worker


class GivenModel:
    """A model with given queries `[layers, Hq, T, d]`, keys and values `[layers, Hkv, T, d]` for each position."""

    def __init__(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        self.queries, self.keys, self.values = queries, keys, values
        self.num_query_heads = queries.shape[1]
        self.lm_head = LMHead(
            VocabEmbedding(2, 1, SingleRank(), torch.float32, torch.device("cpu")), True, SingleRank()
        )
        self.slots: list[int] = []

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionContext, wanted: Tensor | None = None
    ) -> Tensor:
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            attention.store(layer, by_token(keys, positions), by_token(values, positions))
        self.slots = attention.slot_mapping.tolist()
        return torch.zeros(len(token_ids if wanted is None else wanted), 1)

    def logits(self, hidden: Tensor, **options: Any) -> Tensor:
        return torch.zeros(len(hidden), 2)

    def recompute_queries(
        self, token_ids: Tensor, positions: Tensor, attention: Any, visit: Callable[[int, Tensor], None]
    ) -> None:
        for layer, queries in enumerate(self.queries):
            visit(layer, by_token(queries, positions))


def by_token(heads: Tensor, positions: Tensor) -> Tensor:
    return heads[:, positions].transpose(0, 1).contiguous()


class Run:
    """One sequence through scheduler and worker; `forced` are the tokens that are sampled, whatever the logits."""

    def __init__(
        self, model: Any, config: EngineConfig, shape: CacheShape, backend: str, prompt: list[int], forced: list[int]
    ) -> None:
        self.cache = PagedKVCache(shape, config.num_blocks)
        attention = make_backend(backend, self.cache, model.num_query_heads, shape.head_dim**-0.5)
        self.recorder = Recorder(ModelRunner(model, attention, config), config)
        self.scheduler = Scheduler(config, EngineStats(num_blocks=config.num_blocks))
        self.forced = iter(forced)
        sampling = SamplingParams(temperature=0)
        tail_start = 0 if config.compression.compress_prompt else None
        length = len(prompt) + len(forced)
        self.seq = Sequence(0, "0", prompt, sampling, max_length=length, tail_start=tail_start)
        self.scheduler.add(self.seq)

    def step(self) -> StepPlan:
        poison(self.scheduler, self.cache)
        plan = self.scheduler.schedule()
        result = self.recorder.execute(plan)
        self.scheduler.update(plan, StepResult([SampledToken(next(self.forced)) for _ in result.tokens]))
        self.scheduler.check()
        return plan

    def positions(self) -> Tensor:
        """Whose entries are cached, by the recorder's account: `[layers, kv_heads, entries]`."""
        cached = self.recorder.alive[0].cached
        return cached.nonzero()[:, 2].view(*cached.shape[:2], -1)


def hand_out_first(blocks: BlockManager, order: list[int]) -> None:
    """Let an empty pool hand out the blocks `order` first."""
    owners = {}
    for i in range(blocks.num_blocks):
        owner = Sequence(i, str(i), [0], SamplingParams(), max_length=2)
        blocks.share(owner, blocks.no_hit)
        blocks.append(owner, 1)
        owners[owner.tables[0].blocks[0]] = owner
    for block in [*order, *sorted(set(owners) - set(order))]:
        blocks.release(owners[block])


@BACKENDS
@pytest.mark.parametrize("name", ["paged_compaction", "paged_compaction_256"])
def test_paged_compaction(load_vectors: Callable, name: str, backend: str) -> None:
    """A window at the end of a strewn block table: the table, the lengths, the next slot, the entries."""
    arrays, meta = load_vectors(name)
    for i, case in enumerate(meta["cases"]):
        block_size, length, start = case["B"], case["C"], case["start"]
        table, after = arrays[f"c{i}_block_table"].tolist(), arrays[f"c{i}_block_table_after"].tolist()
        keys, values = (given_rows(arrays[f"c{i}_{kind}_cache"], table, length) for kind in "kv")
        model = GivenModel(torch.zeros(case["L"], case["Hkv"], length + 1, case["d"]), keys, values)
        # The sequence decodes until the first event, which the period puts at its length; the windows of a prompt that
        # may be compressed wait for none.
        prompt = start - (case["tail"] == 0) if start else length
        config = EngineConfig(
            num_blocks=case["num_blocks"],
            block_size=block_size,
            max_model_len=length + 8,
            max_num_seqs=1,
            enable_prefix_caching=False,
            compression=paper_compression(
                method="kara",
                period=max(1, length - prompt),
                window_blocks=case["window_blocks"],
                retain_tokens=case["keep_total"],
                buffer=case["U"],
                compress_prompt=start == 0,
            ),
        )
        shape = CacheShape(case["L"], case["Hkv"], case["d"], block_size, torch.float32)
        run = Run(model, config, shape, backend, [0] * prompt, [0] * (length + 2 - prompt))
        kept = torch.from_numpy(arrays[f"c{i}_kept"])
        run.recorder._choose = lambda *_, kept=kept, **__: kept
        hand_out_first(run.scheduler.blocks, table)
        while run.seq.logical_length < length:
            assert not run.step().compressions
        (held,) = run.seq.tables
        assert held.blocks == block_table_of(run.recorder.runner, 0) == table
        (job,) = run.step().compressions

        assert job.parts[0].first_block * block_size == start
        # The same step computed one more token.
        entries, positions = kv_pairs_of(run.recorder.runner, 0)[..., :-1, :], run.positions()[..., :-1]
        assert run.seq.cached_length - 1 == entries.shape[3] == case["C_after"]
        assert held.blocks[: len(after)] == after
        assert held.blocks == block_table_of(run.recorder.runner, 0)
        assert set(table) - set(after) == set(arrays[f"c{i}_freed"].tolist())
        assert len(held.blocks) - len(after) == (case["next_slot"] == -1)
        if case["next_slot"] != -1:
            assert model.slots == [case["next_slot"]]
        for plane, kind in enumerate("kv"):
            assert torch.equal(entries[:, plane], torch.from_numpy(arrays[f"c{i}_{kind}_after_logical"]))
        assert torch.equal(positions, torch.from_numpy(arrays[f"c{i}_positions_after"]))


def given_rows(cache: np.ndarray, table: list[int], length: int) -> Tensor:
    """`[layers, blocks, block_size, Hkv, d]` through a table, and a row of zeros -> `[layers, Hkv, length + 1, d]`."""
    rows = torch.from_numpy(cache)[:, table].flatten(1, 2)[:, :length].transpose(1, 2)
    return torch.nn.functional.pad(rows, (0, 0, 0, 1))


@BACKENDS
@pytest.mark.parametrize("theta", [10000, 500000, 1000000])
def test_rotations_stay_those_of_the_true_positions(load_vectors: Callable, theta: int, backend: str) -> None:
    arrays, meta = load_vectors("rope_after_compaction")
    num_heads, num_kv_heads, head_dim = meta["Hq"], meta["Hkv"], meta["d"]
    raw_queries, raw_keys, values, kept = (torch.from_numpy(arrays[name]) for name in ("q_raw", "k_raw", "v", "kept"))
    length, entries = raw_keys.shape[1], kept.shape[1]
    cos_sin = rotary_table(model_config(rope=Rope(theta), head_dim=head_dim), length + 1, CPU)

    def rotated(heads: Tensor, positions: Tensor) -> Tensor:
        """`[heads, T, d]` -> `[T, heads, d]`."""
        rows = heads.transpose(0, 1).flatten(1).clone()
        rotary(rows, positions, cos_sin, heads.shape[0], 0, head_dim)
        return rows.unflatten(1, (-1, head_dim))

    cache = PagedKVCache(CacheShape(1, num_kv_heads, head_dim, 8, torch.float32), 7)
    cache.data.fill_(torch.nan)
    attention, operations = make_backend(backend, cache, num_heads, head_dim**-0.5), make_operations(cache)
    table = torch.tensor([3, 6, 0, 4, 1, 5])
    positions = torch.arange(length)
    keys = rotated(raw_keys, positions)
    expected_keys = torch.from_numpy(arrays[f"k_rot_{theta}"]).transpose(0, 1).float()
    torch.testing.assert_close(keys, expected_keys, rtol=0, atol=1e-5)
    operations.store(0, keys, values.transpose(0, 1).contiguous(), table[positions // 8] * 8 + positions % 8)
    operations.compact(kept[None, None], table[None], table[None, :3].contiguous())

    def attended(position: int) -> Tensor:
        batch = AttentionBatch(
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            last_kv_index=torch.tensor([entries - 1], dtype=torch.int32),
            block_tables=table[None, :3].int().contiguous(),
        )
        queries = rotated(raw_queries.unsqueeze(1), torch.tensor([position]))
        return attention.run(0, queries, attention.plan(batch))[0].double()

    right = torch.from_numpy(arrays[f"out_{theta}"])
    wrong = torch.from_numpy(arrays[f"wrong_shrunk_position_{theta}"])
    torch.testing.assert_close(attended(length), right, rtol=0, atol=1e-5)
    torch.testing.assert_close(attended(entries), wrong, rtol=0, atol=1e-5)
    assert (right - wrong).abs().max() > 0.01


def model_config(**options: Any) -> ModelConfig:
    defaults = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_query_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope": Rope(1000.0),
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "qkv_bias": False,
        "qk_norm": False,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_ids": (),
    }
    return ModelConfig(**(defaults | options))


def standalone(case: dict[str, Any], **options: Any) -> CompressionConfig:
    compressible = case["W"] - case["U"]
    tenths = int(case["r"].removeprefix("0."))
    return CompressionConfig(
        policy="standalone",
        window_blocks=case["W"],
        retain_tokens=case["U"] + -(-compressible * tenths // 10),
        buffer=case["U"],
        chunk_budget=case["alpha"],
        max_chunk=case["gamma"],
        **({"method": "kara"} | options),
    )


@BACKENDS
@pytest.mark.parametrize(("case", "prompt"), [(0, 10), (1, 1), (1, 100), (1, 160)])
def test_standalone_schedule(load_vectors: Callable, case: int, prompt: int, backend: str) -> None:
    """Sliding windows over given queries and keys. Those of a prompt are compressed in one event, to the same end."""
    arrays, meta = load_vectors("kara_schedule")
    settings = meta["cases"][case]
    queries, keys = (torch.nn.functional.pad(torch.from_numpy(arrays[f"c{case}_{x}"]), (0, 0, 0, 1)) for x in "qk")
    values = torch.arange(keys.shape[1]).float()[:, None].expand_as(keys)
    model = GivenModel(queries[None], keys[None], values[None])
    config = EngineConfig(
        num_blocks=200,
        block_size=1,
        max_model_len=200,
        max_num_seqs=1,
        max_num_batched_tokens=48,
        compression=standalone(settings, compress_prompt=case == 1),
    )
    length = keys.shape[1] - 1
    assert settings["protected_prefix"] == (prompt if case == 0 else 0)
    shape = CacheShape(1, settings["Hkv"], keys.shape[2], 1, torch.float32)
    run = Run(model, config, shape, backend, [0] * prompt, [0] * (length + 2 - prompt))
    while run.seq.logical_length <= length:
        run.step()
    assert [event.position for event in run.recorder.events] == arrays[f"c{case}_window_starts"].tolist()
    expected = torch.from_numpy(arrays[f"c{case}_positions"])
    assert torch.equal(run.positions()[0, :, :-1], expected)
    entries = kv_pairs_of(run.recorder.runner, 0)[0, :, :, :-1]
    assert torch.equal(entries[1, :, :, 0].long(), expected)
    assert torch.equal(entries[0], torch.stack([keys[head, expected[head]] for head in range(len(keys))]))


@BACKENDS
def test_recomputed_queries(load_vectors: Callable, backend: str) -> None:
    """A small decoder in its vectors' own text: queries, survivors, hidden states and cache over three events."""
    arrays, meta = load_vectors("query_recompute")
    model_settings = model_config()
    model = build_decoder(model_settings, SingleRank(), torch.float32, CPU, 64)
    model.allocate(Packing())
    for name, weight in model.weights().items():
        weight.write(0, torch.from_numpy(vector_weight(arrays, name)))
    model.compile()
    config = EngineConfig(num_blocks=64, block_size=1, max_model_len=64, max_num_seqs=1, compression=standalone(meta))
    shape = CacheShape(meta["L"], meta["Hkv"], meta["d"], 1, torch.float32)
    ids, prompt = arrays["ids"].tolist(), meta["P"]
    run = Run(model, config, shape, backend, ids[:prompt], [*ids[prompt:], 0])
    while run.seq.logical_length < len(ids):
        run.step()

    assert len(run.recorder.events) == 3
    for i, event in enumerate(run.recorder.events):
        assert event.position == arrays[f"e{i}_positions"][0]
        expected = torch.from_numpy(arrays[f"e{i}_q_recomputed"])
        torch.testing.assert_close(torch.stack(event.queries).double(), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(event.kept[..., : -meta["U"]], torch.from_numpy(arrays[f"e{i}_kept"]))
    residual = torch.from_numpy(arrays["hidden_per_decode_step"])
    normalized = residual / (residual.square().mean(-1, keepdim=True) + meta["rms_eps"]).sqrt()
    hidden = torch.stack(run.recorder.hidden[1:]).double()
    torch.testing.assert_close(hidden, normalized, rtol=1e-4, atol=1e-4)
    assert torch.equal(run.positions(), torch.from_numpy(arrays["cache_positions"]))
    for plane, kind in enumerate("kv"):
        cached = kv_pairs_of(run.recorder.runner, 0)[:, plane].double()
        torch.testing.assert_close(cached, torch.from_numpy(arrays[f"cache_{kind}"]), rtol=1e-4, atol=1e-4)


def vector_weight(arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The weight that the checkpoint format calls `name`."""
    if name == "model.norm.weight":
        return np.ones(16, np.float32)
    if name == "model.embed_tokens.weight":
        return arrays["w_emb"]
    _, _, layer, *_, last, _ = name.split(".")
    short = {
        "input_layernorm": "n1_",
        "post_attention_layernorm": "n2_",
        "gate_proj": "g",
        "up_proj": "u",
        "down_proj": "dn",
    }
    return arrays[f"w_{short.get(last, last[0])}{layer}"]


# The engine, against dense attention over the survivors

FAMILIES = {"llama": {}, "qwen3": {"head_dim": 32}}
EVERY_FAMILY = pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=pytest.mark.long)])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, options in FAMILIES.items():
        make_checkpoint(paths[family], family, **options)
    return paths


@pytest.fixture(scope="module")
def decoders(checkpoints: dict[str, Path]) -> dict[str, DenseDecoder]:
    return {family: DenseDecoder(path) for family, path in checkpoints.items()}


def compression_config(**options: Any) -> CompressionConfig:
    kara = {"method": "kara", "period": 8, "window_blocks": 2, "buffer": 4, "chunk_budget": 4}
    return paper_compression(**(kara | options))


def run_engine(path: Path, prompts: list[list[int]], params: SamplingParams, **options: Any) -> tuple[LLM, Recorder]:
    """Complete the prompts with an engine of these options."""
    llm = make_llm(path, **options)
    complete(llm, prompts, params)
    return llm, llm.llm_engine.executor


def complete(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    """All are added at once."""
    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(i), prompt, params)
    finish(llm)


def make_llm(path: Path, **options: Any) -> LLM:
    defaults = {"block_size": 16, "num_gpu_blocks_override": 64, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    llm = LLM(path, max_model_len=400, **(defaults | options))
    llm.llm_engine.executor = Recorder(llm.llm_engine.executor.runner, llm.config)
    return llm


def step(llm: LLM) -> None:
    engine = llm.llm_engine
    poison(engine.scheduler, engine.executor.runner.cache)
    engine.step()


def finish(llm: LLM) -> None:
    while llm.llm_engine.has_unfinished_requests():
        step(llm)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def dense_kara(decoder: DenseDecoder, dense: DensePass, event: Event, config: CompressionConfig, size: int) -> Tensor:
    """Kara's choice, literally, from queries that are recomputed over what was cached before the event."""
    scored = size - config.buffer
    positions = [event.position + row for row in range(size)]
    length = len(dense.logits)
    visible = torch.stack([event.cached[..., :length] & (torch.arange(length) <= p) for p in positions], dim=2)
    recomputed = decoder.recompute(dense, event.text.tokens, positions, visible)
    kept = []
    for queries, keys in zip(recomputed.queries, recomputed.keys, strict=True):
        window = keys[:, event.position : event.position + size]
        for scores in dense_scores(queries[None], window[None], config.buffer)[0]:
            chosen = literal_token2chunk(scores.numpy(), config.retained(16) - config.buffer, **config.options)
            kept.append([*chosen, *range(scored, size)])
    return torch.tensor(kept).view_as(event.kept)


@EVERY_FAMILY
def test_the_dense_decoder_is_that_of_transformers(
    checkpoints: dict[str, Path], decoders: dict[str, DenseDecoder], family: str
) -> None:
    (token_ids,) = random_token_ids(100)
    visible = torch.ones(3, 2, 100, 100, dtype=torch.bool).tril()
    found = decoders[family].forward(token_ids, visible).logits
    model = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float64)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)  # transformers normalizes in float32 all the same


def with_retention(name: str, first: Any, second: Any) -> pytest.MarkDecorator:
    """Another parameter beside `retain_tokens`: both values of each by default, all pairs with `--long`."""
    pairs = [(first, None, "whole blocks"), (second, 17, "exact count")]
    others = [(first, 17, "exact count"), (second, None, "whole blocks")]
    usual = [pytest.param(value, retain, id=f"{value}-{kept}") for value, retain, kept in pairs]
    long = [pytest.param(value, retain, id=f"{value}-{kept}", marks=pytest.mark.long) for value, retain, kept in others]
    return pytest.mark.parametrize((name, "retain_tokens"), usual + long)


@with_retention("compress_prompt", False, True)
@EVERY_FAMILY
def test_decoding_is_dense_attention_over_the_survivors(
    checkpoints: dict[str, Path],
    decoders: dict[str, DenseDecoder],
    family: str,
    compress_prompt: bool,
    retain_tokens: int | None,
) -> None:
    config = compression_config(retain_tokens=retain_tokens, compress_prompt=compress_prompt)
    prompts = random_token_ids(3, 20, 48, 70)
    llm, recorder = run_engine(checkpoints[family], prompts, greedy(250), compression=config)
    for text, prompt in zip(recorder.texts, prompts, strict=True):
        assert_dense(decoders[family], text)
        assert text.num_windows >= 5
        assert text.length == len(prompt) + 249 == len(text.logits) + len(prompt) - 1
        dropped = text.num_windows * (32 - (retain_tokens or 16))
        assert (text.cached.sum(-1) == text.length - dropped).all()
    assert llm.stats().windows_compressed == len(recorder.events)


@EVERY_FAMILY
def test_survivors_are_those_of_dense_kara(
    checkpoints: dict[str, Path], decoders: dict[str, DenseDecoder], family: str
) -> None:
    config = compression_config(compress_prompt=True, chunk_budget=6, max_chunk=5)
    prompts = random_token_ids(5, 75, seed=3)  # no choice is so close that 1e-4 of a score would change it
    _, recorder = run_engine(checkpoints[family], prompts, greedy(200), compression=config)
    passes = {id(text): assert_dense(decoders[family], text) for text in recorder.texts}
    assert len(recorder.events) >= 12
    for event in recorder.events:
        expected = dense_kara(decoders[family], passes[id(event.text)], event, config, 32)
        assert torch.equal(event.kept, expected)


def survivors(recorder: Recorder) -> dict[tuple[int, ...], list[tuple[int, list]]]:
    """For each prompt (here of two tokens) the windows compressed in its text, and what was kept of them."""
    found = {}
    for event in recorder.events:
        found.setdefault(tuple(event.text.tokens[:2]), []).append((event.position, event.kept.tolist()))
    return found


@pytest.mark.parametrize(
    "retain_tokens", [pytest.param(None, id="whole blocks", marks=pytest.mark.long), pytest.param(17, id="exact count")]
)
def test_survivors_depend_on_their_sequence_alone(checkpoints: dict[str, Path], retain_tokens: int | None) -> None:
    """Not on those that share the event, nor on the number of rows that are recomputed at a time."""
    prompts = random_token_ids(2, 2, 2, 2, 2)
    options: dict[str, Any] = {"compression": compression_config(retain_tokens=retain_tokens, max_sequences=5)}

    def run(prompts: list[list[int]], rows_per_pass: int = 256) -> dict:
        llm = make_llm(checkpoints["qwen3"], **options)
        llm.llm_engine.executor.runner.compressor.selector.max_num_batched_tokens = rows_per_pass
        complete(llm, prompts, greedy(150))
        return survivors(llm.llm_engine.executor)

    together = run(prompts)
    assert len(together) == 5 and all(len(windows) >= 3 for windows in together.values())
    assert run(prompts[::-1]) == together
    assert run(prompts, rows_per_pass=16) == together  # a window at a time
    assert run(prompts, rows_per_pass=3 * 32) == together
    for prompt in prompts[:2]:
        assert run([prompt]) == {tuple(prompt): together[tuple(prompt)]}


@with_retention("num_threads", 1, 4)
def test_completions_of_one_prompt_are_compressed_apart(
    checkpoints: dict[str, Path], decoders: dict[str, DenseDecoder], num_threads: int, retain_tokens: int | None
) -> None:
    """Three sequences compress the blocks that they share in one event: two by copy, and the last one in place."""
    torch.set_num_threads(num_threads)
    config = compression_config(retain_tokens=retain_tokens, compress_prompt=True)
    params = SamplingParams(n=3, temperature=1.0, seed=0, max_tokens=120, ignore_eos=True)
    _, recorder = run_engine(checkpoints["qwen3"], random_token_ids(75, 100), params, compression=config)
    assert len({tuple(text.tokens) for text in recorder.texts}) == 6
    shared = [event for event in recorder.events if event.position == 0]
    assert [event.copied for event in sorted(shared, key=lambda event: event.seq_id)] == [True, True, False] * 2
    for text in recorder.texts:
        assert_dense(decoders["qwen3"], text)
        assert text.num_windows >= 4


def test_a_shared_prompt_is_compressed_for_each(
    checkpoints: dict[str, Path], decoders: dict[str, DenseDecoder]
) -> None:
    """Requests that find the beginning of their prompt in the prefix cache, and one that comes too late to find it."""
    common, *tails = random_token_ids(64, 40, 20, 30, 10)
    prompts = [common + tail for tail in tails]
    llm = make_llm(
        checkpoints["qwen3"], max_num_batched_tokens=96, compression=compression_config(compress_prompt=True)
    )
    recorder = llm.llm_engine.executor
    outputs = [llm.llm_engine.add_request(str(i), prompt, greedy(80)) for i, prompt in enumerate(prompts[:3])]
    finish(llm)
    outputs.append(llm.llm_engine.add_request("late", prompts[3], greedy(80)))
    finish(llm)
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 64, 64, 0]
    assert [event.copied for event in recorder.events if event.position == 0] == [True, True, False, False]
    for text in recorder.texts:
        assert_dense(decoders["qwen3"], text)


def test_a_shared_output_stays_whole_for_others(
    checkpoints: dict[str, Path], decoders: dict[str, DenseDecoder]
) -> None:
    """A prompt that continues another's output, found in the prefix cache, while the other compresses that output."""
    llm = make_llm(checkpoints["qwen3"], compression=compression_config(period=64))
    recorder = llm.llm_engine.executor
    (prompt,) = random_token_ids(20)
    first = llm.llm_engine.add_request("first", prompt, greedy(150))
    for _ in range(58):
        step(llm)
    second = llm.llm_engine.add_request("second", prompt + first.outputs[0].token_ids, greedy(150))
    finish(llm)
    assert second.metrics.num_cached_tokens == 64
    event = recorder.events[0]  # of two blocks, the first of which is shared
    assert (event.seq_id, event.position, event.copied) == (0, 48, True)
    assert {event.seq_id for event in recorder.events} == {0, 1}
    for text in recorder.texts:
        assert_dense(decoders["qwen3"], text)


def test_a_compressed_output_is_not_offered(checkpoints: dict[str, Path], decoders: dict[str, DenseDecoder]) -> None:
    """The next turn of a conversation finds what came before the first window, and computes the rest again. What it
    computed, as its prompt, is then found by all: no block that was filled after the event stands in its place."""
    llm, recorder = run_engine(
        checkpoints["qwen3"], random_token_ids(20), greedy(120), compression=compression_config(period=64)
    )
    (event,), (text,) = recorder.events, recorder.texts
    assert event.position == 48
    for name, hit in (("turn", 48), ("again", 128)):
        turn = llm.llm_engine.add_request(name, text.tokens, greedy(100))
        finish(llm)
        assert turn.metrics.num_cached_tokens == hit
        assert recorder.texts[-1].num_windows > 0
        assert_dense(decoders["qwen3"], recorder.texts[-1])


@with_retention("compress_prompt", True, False)
def test_a_preempted_sequence_has_a_consistent_cache(
    checkpoints: dict[str, Path], decoders: dict[str, DenseDecoder], compress_prompt: bool, retain_tokens: int | None
) -> None:
    config = compression_config(retain_tokens=retain_tokens, compress_prompt=compress_prompt)
    prompts = random_token_ids(3, 20, 40, 70, 33, 50)
    llm, recorder = run_engine(
        checkpoints["qwen3"], prompts, greedy(160), compression=config, num_gpu_blocks_override=24
    )
    assert llm.stats().preemptions >= 3
    assert_resumed(decoders["qwen3"], recorder)


def test_a_sequence_that_fits_only_compressed(checkpoints: dict[str, Path], decoders: dict[str, DenseDecoder]) -> None:
    """It has the pool to itself. When that is full, every complete window is compressed, whatever the period, and the
    sequence goes on: it is never preempted."""
    llm, recorder = run_engine(
        checkpoints["qwen3"],
        random_token_ids(20),
        greedy(300),
        compression=compression_config(period=10_000),
        num_gpu_blocks_override=14,
    )
    (text,) = recorder.texts
    assert not text.resumed and llm.stats().preemptions == 0
    assert text.num_windows >= 3
    assert_dense(decoders["qwen3"], text)


def assert_resumed(decoder: DenseDecoder, recorder: Recorder) -> None:
    """Some sequences were resumed and compressed, and all computed what they should, before and after."""
    assert sum(text.num_windows for text in recorder.texts if text.resumed) >= 6
    for text in recorder.texts:
        if text.logits:  # else it was preempted once more before it was back
            assert_dense(decoder, text)
