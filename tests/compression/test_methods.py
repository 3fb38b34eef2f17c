"""Every compression method: golden vectors, the promises all of them make, and each against a literal reference."""

from __future__ import annotations

import math
from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest
import torch

from kvllm.compression import mass
from kvllm.compression.gates import Gates
from kvllm.compression.mass import Softmax, attention_mass
from kvllm.compression.methods import adakv, chunkkv, keydiff, pyramidkv, rkv, snapkv
from kvllm.compression.registry import METHODS as OWN
from kvllm.compression.statistics import QueryStatistics
from tests.helpers.event_checks import literal_resemblance
from tests.helpers.example_methods import EXAMPLES
from tests.helpers.gates import random_gates
from tests.helpers.literal_kara import literal_token2chunk
from tests.helpers.literal_methods import LITERALS, OPTIONS, Sequence

CLOSE = {"rtol": 1e-4, "atol": 0.0, "check_dtype": False}
METHODS = {**OWN, **EXAMPLES}
RECENT_ROWS = 7
CHUNK_BUDGET, MAX_CHUNK = 6, 5
LAYER, NUM_LAYERS = 1, 4


def batch_of_one(arrays, name):
    return torch.from_numpy(arrays[name])[None]


def region(seed, num_seqs, num_heads, num_kv_heads, length, head_dim, dtype=torch.float32):
    """Queries, keys of which some nearly repeat earlier ones, and the mass of H2O."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(num_seqs, num_heads, length, head_dim, generator=generator) * 2
    keys = torch.randn(num_seqs, num_kv_heads, length, head_dim, generator=generator)
    repeated = keys[:, :, length // 2 :: 3]
    repeated.mul_(0.2).add_(keys[:, :, : repeated.shape[2]])
    return queries.to(dtype), keys.to(dtype), torch.rand(num_seqs, num_kv_heads, length, generator=generator)


def values_of(keys):
    """Values that belong to keys, whatever other sequences and heads there are."""
    return (3 * keys.detach().cpu().float()).cos().to(keys)


def norms_of(keys):
    """Lengths of these values."""
    return values_of(keys).float().norm(dim=-1)


def frequencies_of(keys):
    """The rotary embedding's, as for most models."""
    return (100.0 ** -torch.linspace(0, 1, keys.shape[3] // 2 + 1)[:-1]).to(keys.device)


def statistics_of(num_heads, head_dim, first=0):
    """Of query heads from `first` on in one layer: each head has its own, whatever heads there are beside it."""
    heads = []
    for head in range(first, first + num_heads):
        generator = torch.Generator().manual_seed(head)
        mean, factor = (torch.randn(*shape, generator=generator) for shape in ((head_dim,), (head_dim, head_dim)))
        lengths = torch.hypot(*mean.chunk(2)) + torch.rand(head_dim // 2, generator=generator)
        heads.append((mean, lengths, factor @ factor.T / head_dim))
    return QueryStatistics(*(torch.stack(of_heads)[None] for of_heads in zip(*heads, strict=True)))


def place_of(i, length):
    """Of sequence i: KV pairs of its cache in front of the region, and the position of the region's last one."""
    return i, 2 * i + length - 1


def on_device(queries, keys):
    found = statistics_of(queries.shape[1], keys.shape[3])
    return QueryStatistics(*(getattr(found, field.name).to(keys.device) for field in fields(found)))


def gates_of(keys):
    found = random_gates(1, keys.shape[1], keys.shape[3])
    return Gates(*(getattr(found, field.name).to(keys.device) for field in fields(found)))


def ages_of(keys):
    """The first five have survived a compression."""
    ages = torch.arange(keys.shape[2], 0, -1.0)
    ages[:5] = 64.0
    return ages.to(keys.device).expand(len(keys), -1)


def call(name, queries, keys, heavy, *, retain, buffer, first_seed=0, **options):
    """A method as an engine calls it: with the query rows it asks for, and everything there is as options."""
    rows = {"window": queries.shape[2], "buffer": buffer, "recent": RECENT_ROWS, "none": 0}[METHODS[name].spec.queries]
    places = [place_of(first_seed + i, keys.shape[2]) for i in range(len(keys))]
    starts, last_positions = zip(*places, strict=True)
    offered = {
        "chunk_budget": CHUNK_BUDGET, "max_chunk": MAX_CHUNK, "layer": LAYER, "num_layers": NUM_LAYERS,
        "seeds": range(first_seed, first_seed + len(keys)), "capacity": retain + 3, "mass": heavy,
        "received": heavy,
        "starts": starts, "last_positions": last_positions, "values": values_of(keys),
        "value_norms": norms_of(keys),
        "frequencies": frequencies_of(keys), "statistics": on_device(queries, keys), "gates": gates_of(keys),
    }  # fmt: skip
    if METHODS[name].spec.reselects:
        offered["observed"] = torch.zeros(keys.shape[:3]) if heavy is None else heavy
        offered["observed"] = offered["observed"][..., : keys.shape[2] - buffer]
        offered["ages"] = ages_of(keys)
    last_rows = queries[:, :, queries.shape[2] - rows :] if rows else None
    return METHODS[name](last_rows, keys, retain=retain, buffer=buffer, **(offered | OPTIONS | options))


# Golden vectors


def test_snapkv_matches_the_vectors(load_vectors):
    arrays, meta = load_vectors("snapkv")
    pools = {"avg": "average", "max": "max"}
    for i, case in enumerate(meta["cases"]):
        queries, keys = batch_of_one(arrays, f"c{i}_q_last"), batch_of_one(arrays, f"c{i}_k")
        options = {"kernel": case["kernel"], "pool": pools[case["pool"]]}
        scores = snapkv.scores(queries, keys, case["w"], **options)
        torch.testing.assert_close(scores, batch_of_one(arrays, f"c{i}_scores"), **CLOSE)
        kept = snapkv.select(queries, keys, retain=case["N"], buffer=case["w"], **options)
        expected = batch_of_one(arrays, f"c{i}_kept")
        if case["pool"] == "max":  # neighbours tie exactly: any of them is right
            assert kept.shape == expected.shape
            kept_mass = scores.gather(-1, kept[..., : -case["w"]]).sum(dim=-1)
            torch.testing.assert_close(kept_mass, batch_of_one(arrays, f"c{i}_kept_mass"), **CLOSE)
        else:
            assert torch.equal(kept, expected), case


def test_rkv_matches_the_vectors(load_vectors):
    arrays, meta = load_vectors("rkv")
    for i, case in enumerate(meta["cases"]):
        queries, keys = batch_of_one(arrays, f"c{i}_q_last"), batch_of_one(arrays, f"c{i}_k")
        importance = rkv.importance(queries[0], keys[0, :, : -case["w"]])
        torch.testing.assert_close(importance[None], batch_of_one(arrays, f"c{i}_importance"), **CLOSE)
        for strict_public, field in ((True, "redundancy"), (False, "redundancy_paperlike")):
            redundancy = rkv.redundancy(keys[0], strict_public=strict_public)
            torch.testing.assert_close(redundancy[None], batch_of_one(arrays, f"c{i}_{field}"), **CLOSE)
        kept = rkv.select(queries, keys, retain=case["N"], buffer=case["w"], mix=case["lam"])
        assert torch.equal(kept, batch_of_one(arrays, f"c{i}_kept")), case


def test_keydiff_matches_the_vectors(load_vectors):
    arrays, meta = load_vectors("keydiff")
    for i, case in enumerate(meta["cases"]):
        keys = batch_of_one(arrays, f"c{i}_k")
        torch.testing.assert_close(keydiff.scores(keys), batch_of_one(arrays, f"c{i}_scores"), rtol=1e-4, atol=1e-6,
                                   check_dtype=False)  # fmt: skip
        kept = METHODS["keydiff"](None, keys, retain=case["N"], buffer=case["recent"])
        assert torch.equal(kept, batch_of_one(arrays, f"c{i}_kept")), case


def test_streaming_and_sliding_window_match_the_vectors(load_vectors):
    arrays, _ = load_vectors("streaming_sliding")
    for (length, retain, sinks), row in zip(arrays["streaming_cases"].tolist(), arrays["streaming_kept"], strict=True):
        keys = torch.zeros(2, 3, length, 4)
        kept = METHODS["streaming"].select(None, keys, retain=retain, buffer=1, sinks=sinks)
        assert kept.tolist() == [[[j for j in row.tolist() if j >= 0]] * 3] * 2
    for (length, retain), row in zip(arrays["sliding_cases"].tolist(), arrays["sliding_kept"], strict=True):
        kept = METHODS["sliding_window"](None, torch.zeros(2, 3, length, 4), retain=retain, buffer=1)
        assert kept.tolist() == [[[j for j in row.tolist() if j >= 0]] * 3] * 2
    left = 6
    for attended, expected in arrays["sliding_trace"].tolist():
        assert left + 1 == attended
        left = METHODS["sliding_window"](None, torch.zeros(1, 1, attended, 4), retain=8, buffer=1).shape[-1]
        assert left == expected


def test_chunkkv_matches_the_vectors(load_vectors):
    arrays, meta = load_vectors("chunkkv")
    for i, case in enumerate(meta["cases"]):
        scores = batch_of_one(arrays, f"c{i}_scores")
        chunk_scores = chunkkv.chunk_scores(scores, case["c"])
        torch.testing.assert_close(chunk_scores, batch_of_one(arrays, f"c{i}_chunk_scores"), **CLOSE)
        kept = chunkkv.best_chunks(scores, case["N"] - case["w"], case["c"])[0].tolist()
        assert kept + list(range(case["C"] - case["w"], case["C"])) == arrays[f"c{i}_kept"].tolist(), case


@pytest.mark.parametrize("name", [name for name in OWN if "softmax" in OWN[name].arguments])
def test_scores_have_the_scale_of_the_layer(name):
    """With another scale, the choice is that by queries, or their statistics, as much longer."""
    torch.manual_seed(0)
    scale, head_dim = 0.7, 16
    longer = scale * head_dim**0.5
    queries, keys = torch.randn(2, 4, 8, head_dim), torch.randn(2, 2, 80, head_dim)
    mean, covariance = torch.randn(2, 4, head_dim), torch.randn(2, 4, head_dim, head_dim)
    covariance = covariance @ covariance.mT / 16

    def kept(length, **options):
        offered = {"value_norms": torch.ones(2, 2, 80), "starts": [0, 0], "last_positions": [79, 79], "layer": 0}
        offered |= {
            "chunk_budget": 4,
            "max_chunk": 3,
            "num_layers": 2,
            "capacity": 60,
            "evicted_mask": torch.zeros(2, 2, 80, dtype=torch.bool),
        }
        offered["statistics"] = QueryStatistics(length * mean, torch.ones(2, 4, head_dim // 2), length**2 * covariance)
        offered["frequencies"] = torch.linspace(1, 0.01, head_dim // 2)
        return OWN[name](length * queries, keys, retain=30, buffer=8, **offered, **options)

    found = kept(1, softmax=Softmax(scale=scale))
    assert torch.equal(found, kept(longer)) and not torch.equal(found, kept(1))


def test_pyramidkv_matches_the_vectors(load_vectors):
    arrays, meta = load_vectors("pyramidkv")
    for (retain, buffer, num_layers, length), exact in zip(arrays["cases"].tolist(), arrays["exact"], strict=True):
        budgets = pyramidkv.layer_budgets(num_layers, length, retain, buffer, beta=meta["beta"])
        assert budgets == exact[:num_layers].tolist()


def test_adakv_matches_the_vectors(load_vectors):
    arrays, meta = load_vectors("adakv")
    for i, case in enumerate(meta["cases"]):
        scores, base = batch_of_one(arrays, f"c{i}_scores"), case["N"] - case["w"]
        floor = Fraction(str(case["f"]))
        assert torch.equal(adakv.head_counts(scores, base), batch_of_one(arrays, f"c{i}_counts"))
        budgets = adakv.head_budgets(scores, base, floor)
        assert torch.equal(budgets, batch_of_one(arrays, f"c{i}_budgets_exact"))
        assert torch.equal(budgets + case["w"], batch_of_one(arrays, f"c{i}_head_lens"))
        expected = batch_of_one(arrays, f"c{i}_kept_padded")
        for capacity in (expected.shape[-1], case["C"], case["C"] + 1):
            kept = adakv.kept_offsets(scores, case["N"], case["w"], capacity, floor)
            assert kept.shape[-1] == min(capacity, case["C"])
            assert torch.equal(kept[..., : expected.shape[-1]], expected), case
            assert (kept[..., expected.shape[-1] :] == -1).all()


def test_h2o_matches_the_vectors(load_vectors):
    arrays, meta = load_vectors("h2o")
    for i, case in enumerate(meta["cases"]):
        queries, keys = torch.from_numpy(arrays[f"c{i}_q"]), torch.from_numpy(arrays[f"c{i}_k"])
        prompt, retain = case["P"], case["heavy"] + case["recent"]
        positions = torch.arange(prompt).repeat(len(keys), 1)
        heavy = attention_mass(queries[:, :prompt], keys[:, :prompt], torch.arange(prompt))
        torch.testing.assert_close(heavy, torch.from_numpy(arrays[f"c{i}_prefill_mass"]), **CLOSE)
        in_chunks = torch.nn.functional.pad(
            attention_mass(queries[:, :5], keys[:, :5], torch.arange(5)), (0, prompt - 5)
        )
        in_chunks += attention_mass(queries[:, 5:prompt], keys[:, :prompt], torch.arange(5, prompt))
        torch.testing.assert_close(in_chunks, heavy)
        lengths = []
        for step in range(prompt, prompt + case["steps"] + 1):
            if positions.shape[1] >= retain + case["every"]:
                cached = keys.gather(1, positions[..., None].expand(-1, -1, case["d"]))
                options = {"retain": retain, "buffer": case["recent"], "mass": heavy[None]}
                kept = METHODS["h2o"](None, cached[None], **options)[0]
                positions, heavy = positions.gather(1, kept), heavy.gather(1, kept)
            lengths.append(positions.shape[1])
            if step < prompt + case["steps"]:
                positions = torch.cat((positions, torch.full((len(keys), 1), step)), dim=1)
                cached = keys.gather(1, positions[..., None].expand(-1, -1, case["d"]))
                heavy = torch.nn.functional.pad(heavy, (0, 1))
                heavy += attention_mass(queries[:, step : step + 1], cached, torch.tensor([positions.shape[1] - 1]))
        assert lengths[1:] == arrays[f"c{i}_length_trace"].tolist()
        assert torch.equal(positions, torch.from_numpy(arrays[f"c{i}_positions"]))
        torch.testing.assert_close(heavy, torch.from_numpy(arrays[f"c{i}_mass"]), **CLOSE)


def test_ablations_of_kara_match_the_vectors(load_vectors):
    arrays, meta = load_vectors("kara_ablations")
    names = {"no_bi": "kara_no_bi", "no_t2c": "kara_no_token2chunk"}
    for i, case in enumerate(meta["cases"]):
        queries, keys = batch_of_one(arrays, f"c{i}_q"), batch_of_one(arrays, f"c{i}_k")
        expected = batch_of_one(arrays, f"c{i}_window_kept")
        options = {"chunk_budget": case["alpha"], "max_chunk": case["gamma"]}
        kept = call(names[case["variant"]], queries, keys, None, retain=expected.shape[-1], buffer=case["U"], **options)
        assert torch.equal(kept, expected), case


# What all methods promise

SHAPES = [(2, 2), (4, 2), (4, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_promises(name, num_heads, num_kv_heads, dtype):
    length, retain, buffer = 46, 21, 6
    tensors = region(0, 3, num_heads, num_kv_heads, length, 16, dtype)
    before = [tensor.clone() for tensor in tensors]
    kept = call(name, *tensors, retain=retain, buffer=buffer)
    assert kept.dtype == torch.int64 and kept.shape[:2] == (3, num_kv_heads)
    for of_sequence in kept.tolist():
        rows = [[j for j in row if j >= 0] for row in of_sequence]
        assert all(row == sorted(set(row)) and row[-1] < length for row in rows)
        assert all(row[-buffer:] == list(range(length - buffer, length)) for row in rows)
        padded = [row + [-1] * (kept.shape[2] - len(row)) for row in rows]
        assert padded == of_sequence
        assert_counts(name, [len(row) for row in rows], kept.shape[2], length, retain, buffer)
    assert torch.equal(call(name, *tensors, retain=retain, buffer=buffer), kept)
    for i in range(3):
        alone = call(name, *[tensor[i : i + 1] for tensor in tensors], retain=retain, buffer=buffer, first_seed=i)
        assert torch.equal(alone[0], kept[i])
    # Copied even if it is contiguous, as it is with one KV head, whose stride then says nothing.
    copies = [tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format) for tensor in tensors]
    by_token = [copy.transpose(1, 2) for copy in copies]
    assert torch.equal(call(name, *by_token, retain=retain, buffer=buffer), kept)
    everything = torch.arange(length).expand(3, num_kv_heads, length)
    for no_op, protected in ((length, buffer), (length + 1, buffer), (length, length)):
        assert torch.equal(call(name, *tensors, retain=no_op, buffer=protected), everything)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))


def assert_counts(name, counts, width, length, retain, buffer):
    if name == "adakv":
        assert width == retain + 3 and max(counts) <= width and sum(counts) == len(counts) * retain
    elif name == "pyramidkv":
        budget = pyramidkv.layer_budgets(NUM_LAYERS, min(length, retain + 3), retain, buffer)[LAYER]
        assert set(counts) == {budget + buffer} == {width}
    else:
        assert set(counts) == {retain} == {width}


@pytest.mark.parametrize("name", METHODS)
def test_only_the_buffer(name):
    tensors = region(1, 2, 4, 2, 30, 8)
    kept = call(name, *tensors, retain=5, buffer=5)
    assert torch.equal(kept[..., :5], torch.arange(25, 30).expand(2, 2, 5)) and (kept[..., 5:] == -1).all()


DRAWS = ("random", "vase")
"""Methods that draw their heads in order."""


@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].spec.whole_layer or name in DRAWS])
def test_heads_decide_alone(name):
    queries, keys, heavy = region(2, 2, 4, 2, 46, 16)
    kept = call(name, queries, keys, heavy, retain=21, buffer=6)
    first = call(name, queries[:, :2], keys[:, :1], heavy[:, :1], retain=21, buffer=6)
    assert torch.equal(first, kept[:, :1])
    if name not in DRAWS:
        own = {"statistics": statistics_of(2, 16, first=2), "gates": random_gates(1, 1, 16, first=1)}
        second = call(name, queries[:, 2:], keys[:, 1:], heavy[:, 1:], retain=21, buffer=6, **own)
        assert torch.equal(second, kept[:, 1:])


@pytest.mark.parametrize("name", METHODS)
def test_batch_mates_change_no_bit_in_real_regions(name):
    tensors = region(3, 3, 8, 2, 384, 64, torch.bfloat16)
    kept = call(name, *tensors, retain=128, buffer=32)
    for i in range(3):
        alone = call(name, *[tensor[i : i + 1] for tensor in tensors], retain=128, buffer=32, first_seed=i)
        assert torch.equal(alone[0], kept[i])
    queries, keys, _ = tensors
    for scores in (lambda q, k: snapkv.scores(q, k, 32), lambda _, k: keydiff.scores(k)):
        together = scores(queries[:, :, -32:], keys)
        assert torch.equal(scores(queries[2:, :, -32:], keys[2:])[0], together[2])


WITHOUT_QUERIES = [name for name, method in METHODS.items() if method.spec.queries == "none"]


@pytest.mark.parametrize("name", [name for name in WITHOUT_QUERIES if not METHODS[name].by_layer])
def test_layers_together_keep_what_each_keeps_alone(name):
    layers, windows, scored = 3, 2, 352
    _, keys, heavy = region(11, layers * windows, 4, 2, 384, 64, torch.bfloat16)
    statistics = [statistics_of(4, 64, first=4 * layer) for layer in range(layers)]
    gates = random_gates(layers, 2, 64)

    def kept(rows, of_layers, numbers):
        places = [place_of(i, 384) for i in range(windows)] * len(of_layers)
        offered = {
            "chunk_budget": CHUNK_BUDGET, "max_chunk": MAX_CHUNK, "values": values_of(keys[rows]),
            "value_norms": norms_of(keys[rows]),
            "starts": [start for start, _ in places], "last_positions": [last for _, last in places],
            "frequencies": frequencies_of(keys), "observed": heavy[rows, :, :scored],
            "ages": ages_of(keys[rows]),
            "received": heavy[rows], "gates": gates.of_layers(numbers),
            "statistics": QueryStatistics(
                *(torch.cat([getattr(each, field.name) for each in of_layers]) for field in fields(QueryStatistics))
            ),
        }  # fmt: skip
        return METHODS[name](None, keys[rows], retain=128, buffer=32, **(offered | OPTIONS))

    together = kept(slice(None), statistics, range(layers))
    for layer in range(layers):
        rows = slice(layer * windows, (layer + 1) * windows)
        assert torch.equal(kept(rows, statistics[layer : layer + 1], [layer]), together[rows])


@pytest.mark.parametrize(
    "name", [name for name in METHODS if METHODS[name].spec.queries == "recent" and name != "vase"]
)
def test_scoring_turns_tf32_off_for_itself_only(name, monkeypatch):
    seen, bmm = [], torch.bmm

    def recording_bmm(*args):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return bmm(*args)

    monkeypatch.setattr(torch, "bmm", recording_bmm)
    torch.set_float32_matmul_precision("high")
    try:
        call(name, *region(4, 1, 2, 1, 24, 8), retain=12, buffer=4)
        assert seen and set(seen) == {"ieee"}
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_cuda_selects_the_same_as_cpu(name):
    tensors = region(0, 3, 4, 2, 46, 16)
    on_cuda = call(name, *[tensor.cuda() for tensor in tensors], retain=21, buffer=6)
    assert on_cuda.is_cuda and torch.equal(on_cuda.cpu(), call(name, *tensors, retain=21, buffer=6))


@pytest.mark.parametrize("name", METHODS)
def test_misuse_is_reported(name):
    tensors = region(5, 2, 4, 2, 20, 8)
    for retain, buffer in ((8, 9), (30, 21)):
        with pytest.raises(ValueError, match=f"buffer={buffer}"):
            METHODS[name].select(
                tensors[0], tensors[1], retain=retain, buffer=buffer, **required_options(name, tensors[2])
            )
    if METHODS[name].spec.queries != "none":
        with pytest.raises(ValueError, match="Hq a multiple of Hkv"):
            call(name, tensors[0][:, :3], *tensors[1:], retain=10, buffer=2)


def required_options(name, heavy):
    options = {"chunk_budget": 4, "max_chunk": 5, "layer": 0, "num_layers": 2, "seeds": [0, 1], "capacity": 12}
    options |= {"mass": heavy, "starts": [0, 0]}
    options |= {
        "last_positions": [19, 19],
        "values": torch.zeros(*heavy.shape, 8),
        "value_norms": heavy,
        "frequencies": torch.ones(4),
    }
    options |= {"statistics": statistics_of(4, 8), "received": heavy}
    options |= {"gates": random_gates(1, 2, 8), "observed": heavy, "ages": heavy[:, 0] + 1}
    return {key: value for key, value in options.items() if key in METHODS[name].arguments}


def test_misuse_of_single_methods_is_reported():
    queries, keys, heavy = region(6, 2, 4, 2, 20, 8)
    sizes = {"retain": 10, "buffer": 2}
    for select in (snapkv.select, rkv.select):
        with pytest.raises(ValueError, match="kernel=4"):
            select(queries, keys, **sizes, kernel=4)
    with pytest.raises(ValueError, match="20 query tokens"):
        snapkv.select(queries, keys[:, :, :15], **sizes)
    with pytest.raises(ValueError, match=r"last_kv_index \(19,\).*20 query tokens"):
        attention_mass(queries[0], keys[0], torch.arange(19))
    with pytest.raises(ValueError, match="capacity=9"):
        adakv.select(queries, keys, **sizes, capacity=9)
    with pytest.raises(ValueError, match="3 seeds for 2"):
        METHODS["random"](None, keys, **sizes, seeds=[1, 2, 3], layer=0)
    with pytest.raises(ValueError, match=r"mass \(2, 2, 19\)"):
        METHODS["h2o"](None, keys, **sizes, mass=heavy[..., 1:])
    with pytest.raises(ValueError, match=r"received \(2, 2, 19\)"):
        METHODS["kvzip"](None, keys, **sizes, received=heavy[..., 1:])


# Against literal references: plain loops in float64, one sequence, lists of lists


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(logits):
    largest = max(logits)
    powers = [math.exp(logit - largest) for logit in logits]
    return [power / sum(powers) for power in powers]


def best(scores, count):
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[: max(count, 0)]


def group_of(queries, keys, head):
    size = len(queries) // len(keys)
    return queries[head * size : (head + 1) * size]


def logits_of(row, keys):
    return [dot(row, key) / math.sqrt(len(key)) for key in keys]


def literal_snapkv_scores(queries, keys, buffer, kernel, evicted_mask=None):
    of_heads = []
    for head, head_keys in enumerate(keys):
        length, group = len(head_keys), group_of(queries, keys, head)
        received = [0.0] * length
        for rows in group:
            for i, row in enumerate(rows):
                own = length - len(rows) + i
                seen = [j for j in range(own + 1) if evicted_mask is None or not evicted_mask[head][j]]
                for j, probability in zip(seen, softmax(logits_of(row, [head_keys[j] for j in seen])), strict=True):
                    received[j] += probability / (len(group) * len(rows))
        scored = [0.0] * (kernel // 2) + received[: length - buffer] + [0.0] * (kernel // 2)
        pooled = [sum(scored[j : j + kernel]) / kernel for j in range(length - buffer)]
        of_heads.append(
            [-math.inf if evicted_mask is not None and evicted_mask[head][j] else s for j, s in enumerate(pooled)]
        )
    return of_heads


def literal_kara(queries, keys, retain, buffer, chunk_budget, max_chunk):
    kept = []
    for head, head_keys in enumerate(keys):
        scores = [0.0] * (len(head_keys) - buffer)
        for rows in group_of(queries, keys, head):
            for row in rows:
                for j, probability in enumerate(softmax(logits_of(row, head_keys[: len(scores)]))):
                    scores[j] += probability
        kept.append(literal_token2chunk(scores, retain - buffer, chunk_budget, max_chunk))
    return kept


def literal_rkv(queries, keys, retain, buffer):
    kept = []
    for head, head_keys in enumerate(keys):
        group, length = group_of(queries, keys, head), len(head_keys)
        scored = length - buffer
        attention = [0.0] * scored
        for i in range(len(group[0])):
            of_group = [logits_of(rows[i], head_keys[:scored]) for rows in group]
            for j, probability in enumerate(softmax([max(column) for column in zip(*of_group, strict=True)])):
                attention[j] += probability / len(group[0])
        importance = [max(attention[max(j - 3, 0) : j + 4]) for j in range(scored)]
        redundancy = literal_redundancy(head_keys)
        kept.append(best([0.1 * importance[j] - 0.9 * redundancy[j] for j in range(scored)], retain - buffer))
    return kept


def literal_redundancy(keys):
    similar = literal_resemblance(torch.tensor([keys], dtype=torch.float64), threshold=0.5, strict_public=True)
    return softmax((similar[0] / len(keys)).tolist())


def literal_keydiff(keys, retain, buffer):
    kept = []
    for head_keys in keys:
        unit = [[x / math.sqrt(dot(key, key)) for x in key] for key in head_keys]
        anchor = [sum(column) / len(unit) for column in zip(*unit, strict=True)]
        kept.append(best([-dot(key, anchor) for key in unit[: len(unit) - buffer]], retain - buffer))
    return kept


@pytest.mark.parametrize(("rows", "dtype"), [(384, torch.bfloat16), (217, torch.bfloat16), (130, torch.float32)])
@pytest.mark.parametrize("squared", [False, True])
def test_compiled_mass_of_masked_rows_equals_torch(rows, dtype, squared):
    queries, keys, _ = region(10, 2, 8, 2, 384, 64, dtype)
    last_kv_index = (
        torch.arange(384)[torch.randperm(384, generator=torch.Generator().manual_seed(0))[:rows]].sort().values
    )
    of_rows = queries[:, :, last_kv_index]
    found = mass.batched_attention_mass(of_rows, keys, 301, last_kv_index, squared=squared)
    sequences = zip(of_rows, keys[:, :, :301], strict=True)
    expected = torch.stack([attention_mass(*each, last_kv_index, squared=squared) for each in sequences])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    alone = mass.batched_attention_mass(of_rows[1:], keys[1:], 301, last_kv_index, squared=squared)
    assert torch.equal(alone[0], found[1])


@pytest.mark.parametrize("squared", [False, True])
def test_mass_goes_through_the_softmax_of_the_layer(squared):
    """Another scale, a soft cap and learned scores: compiled, in torch, and written out."""
    queries, keys, _ = region(12, 2, 4, 2, 90, 16)
    last_kv_index = torch.arange(5, 90, 3)
    rows, softmax = queries[:, :, last_kv_index], mass.Softmax(0.3, 1.5, torch.linspace(-2, 3, 4))
    options = {"squared": squared, "softmax": softmax}
    found = mass.batched_attention_mass(rows, keys, 77, last_kv_index, **options)
    logits = rows.double().unflatten(1, (2, 2)) @ keys[:, :, None, :77].double().mT * 0.3
    logits = (1.5 * (logits / 1.5).tanh()).masked_fill(torch.arange(77) > last_kv_index[:, None], -torch.inf)
    sinks = softmax.sinks.double().view(1, 2, 2, 1, 1).expand(*logits.shape[:-1], 1)
    probabilities = torch.cat((logits, sinks), dim=-1).softmax(-1)[..., :77]
    expected = (probabilities.square() if squared else probabilities).sum((2, 3))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    in_torch = [attention_mass(*each, last_kv_index, **options) for each in zip(rows, keys[:, :, :77], strict=True)]
    torch.testing.assert_close(torch.stack(in_torch).double(), expected, rtol=1e-5, atol=1e-6)


def literal_chunkkv(scores, total, chunk):
    count = len(scores[0])
    chunks = [range(start, min(start + chunk, count)) for start in range(0, count, chunk)]
    values = [sum(head[j] for head in scores for j in chunk) / len(chunk) for chunk in chunks]
    kept = []
    for c in best(values, len(values)):
        kept += chunks[c][: total - len(kept)]
    return [kept] * len(scores)


def literal_adakv(scores, base, room):
    """Budgets by fractions, cut to the room; one by one, the layer's best scores take what was cut."""
    flat = [(-score, head, j) for head, row in enumerate(scores) for j, score in enumerate(row)]
    of_layer = sorted(flat)[: len(scores) * base]
    exact = [Fraction(4, 5) * sum(h == head for _, h, _ in of_layer) + Fraction(base, 5) for head in range(len(scores))]
    budgets = [math.floor(budget) for budget in exact]
    by_remainder = sorted(range(len(scores)), key=lambda head: (budgets[head] - exact[head], head))
    for head in by_remainder[: len(scores) * base - sum(budgets)]:
        budgets[head] += 1
    kept = [best(row, min(budget, room)) for row, budget in zip(scores, budgets, strict=True)]
    for _, head, j in sorted(flat):
        if sum(map(len, kept)) < len(scores) * base and len(kept[head]) < room and j not in kept[head]:
            kept[head].append(j)
    return kept


def literal(name, queries, keys, heavy, seed, retain, buffer, capacity):
    """The kept offsets of one sequence by head, without the buffer."""
    total, scored = retain - buffer, len(keys[0]) - buffer
    match name:
        case "kara" | "kara_no_bi":
            return literal_kara(queries, keys, retain, buffer, CHUNK_BUDGET, MAX_CHUNK)
        case "kara_no_token2chunk":
            return literal_kara(queries, keys, retain, buffer, 0, MAX_CHUNK)
        case "snapkv":
            return [best(scores, total) for scores in literal_snapkv_scores(queries, keys, buffer, 5)]
        case "pyramidkv":
            # b = 15. With room for 40, from 28.5 down by 9 each; the halves of the first two layers round up. With room
            # for 16, from 16 down by 2/3 each; the remainder of the third layer is the largest. With room for 15, flat.
            assert (total, LAYER, NUM_LAYERS) == (15, 1, 4)
            budget = {15: 15, 16: 15, 40: 20}[capacity - buffer]
            return [best(scores, budget) for scores in literal_snapkv_scores(queries, keys, buffer, 5)]
        case "adakv":
            return literal_adakv(literal_snapkv_scores(queries, keys, buffer, 5), total, capacity - buffer)
        case "chunkkv":
            return literal_chunkkv(literal_snapkv_scores(queries, keys, buffer, 1), total, 10)
        case "rkv":
            return literal_rkv(queries, keys, retain, buffer)
        case "keydiff":
            return literal_keydiff(keys, retain, buffer)
        case "h2o" | "kvzip":
            return [best(row[:scored], total) for row in heavy]
        case "mean_attention":
            ages = [64.0] * 5 + list(range(len(keys[0]) - 5, 0, -1))
            lengths = values_of(torch.tensor(keys)).double().norm(dim=-1).tolist()
            sums, ages, lengths = np.array(heavy), np.array(ages), np.array(lengths)
            scores = sums / ages * lengths**2
            scores[:, len(keys[0]) - min(64, retain // 2) :] = math.inf
            return [best(row[:scored], total) for row in scores.tolist()]
        case "streaming":
            return [[*range(4), *range(scored - total + 4, scored)]] * len(keys)
        case "sliding_window":
            return [list(range(scored - total, scored))] * len(keys)
        case "random":
            lots = np.random.default_rng((seed, LAYER)).random((len(keys), scored)).tolist()
            return [best(row, total) for row in lots]
    if name not in LITERALS:
        pytest.skip(f"{name} has no literal reference")
    as_tensor, statistics = torch.tensor(keys), statistics_of(len(queries), len(keys[0][0]))
    gates = random_gates(1, len(keys), len(keys[0][0]))
    start, last_position = place_of(seed, len(keys[0]))
    sequence = Sequence(
        queries=np.array(queries),
        keys=np.array(keys),
        values=values_of(as_tensor).double().numpy(),
        buffer=buffer,
        start=start,
        last_position=last_position,
        frequencies=frequencies_of(as_tensor[None]).double().numpy(),
        statistics=QueryStatistics(*(getattr(statistics, field.name)[0] for field in fields(statistics))),
        gates=Gates(*(getattr(gates, field.name)[0] for field in fields(gates))),
        seed=seed,
        layer=LAYER,
    )
    return LITERALS[name](sequence, total)


@pytest.mark.parametrize("tile_bytes", [None, 400])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_methods_equal_literal_references(name, num_heads, num_kv_heads, tile_bytes, monkeypatch):
    if tile_bytes is not None:  # two rows of 46 keys: everything is scored in many tiles
        monkeypatch.setattr(mass, "_CPU_TILE_BYTES", tile_bytes)
    length, retain, buffer, num_seqs = 46, 21, 6, 3
    queries, keys, heavy = region(7, num_seqs, num_heads, num_kv_heads, length, 8)
    rows = {"window": length, "buffer": buffer, "recent": RECENT_ROWS, "none": 1}[METHODS[name].spec.queries]
    for capacity in {retain, retain + 1, length} if METHODS[name].spec.ragged else {retain}:
        kept = call(name, queries, keys, heavy, retain=retain, buffer=buffer, capacity=capacity)
        for i in range(num_seqs):
            last_rows = queries[i, :, length - rows :].tolist()
            expected = literal(name, last_rows, keys[i].tolist(), heavy[i].tolist(), i, retain, buffer, capacity)
            expected = [sorted(row) + list(range(length - buffer, length)) for row in expected]
            assert [[j for j in row if j >= 0] for row in kept[i].tolist()] == expected


def test_adakv_cut_to_the_mean_is_snapkv():
    queries, keys, _ = region(8, 2, 4, 2, 46, 8)
    rows = queries[:, :, -6:]
    cut = adakv.select(rows, keys, retain=21, buffer=6, capacity=21)
    assert torch.equal(cut, snapkv.select(rows, keys, retain=21, buffer=6))
    free = adakv.select(rows, keys, retain=21, buffer=6, capacity=46)
    assert (free != -1).sum(dim=-1).unique().numel() > 1, "the heads keep different numbers"


@pytest.mark.parametrize("capacity", [24, 46])
def test_holes_are_neither_attended_to_nor_kept(capacity):
    length, retain, buffer = 46, 21, 6
    queries, keys, _ = region(9, 2, 4, 2, length, 8)
    evicted_mask = torch.zeros(2, 2, length, dtype=torch.bool)
    for (seq, head), (start, end) in zip(np.ndindex(2, 2), ((12, 22), (30, 35), (20, 20), (8, 23)), strict=True):
        evicted_mask[seq, head, start:end] = True
    keys = keys.masked_fill(evicted_mask[..., None], torch.nan)
    options = {"retain": retain, "buffer": buffer, "evicted_mask": evicted_mask}
    uneven = METHODS["adakv"](queries[:, :, -5:], keys, capacity=capacity, **options)
    even = METHODS["pyramidkv"](queries[:, :, -5:], keys, layer=1, num_layers=3, **options)
    for i in range(2):
        scores = literal_snapkv_scores(
            queries[i, :, -5:].tolist(), keys[i].tolist(), buffer, 5, evicted_mask[i].tolist()
        )
        of_adakv = literal_adakv(scores, retain - buffer, capacity - buffer)
        of_pyramidkv = [best(row, retain - buffer) for row in scores]  # the middle layer has the mean
        for kept, expected in ((uneven[i], of_adakv), (even[i], of_pyramidkv)):
            rows = [[j for j in row if 0 <= j < length - buffer] for row in kept.tolist()]
            assert rows == [sorted(row) for row in expected]


def test_a_layer_of_mostly_holes_keeps_its_entries_and_no_hole():
    scores = torch.full((1, 2, 12), -torch.inf)
    scores[0, 0, [1, 9]], scores[0, 1, 5] = 0.5, 0.25
    kept = adakv.kept_offsets(scores, retain=6, buffer=1, capacity=8)
    assert kept.tolist() == [[[1, 9, 12] + [-1] * 5, [5, 12] + [-1] * 6]]


def test_random_draws_every_entry_equally_often():
    keys = torch.zeros(2000, 2, 24, 1)
    sizes = {"retain": 9, "buffer": 4}
    kept = METHODS["random"](None, keys, seeds=range(2000), layer=3, **sizes)
    counts = torch.zeros(2, 24).scatter_add_(1, kept.transpose(0, 1).flatten(1), torch.ones(2, 2000 * 9))
    assert (counts[:, 20:] == 2000).all()
    # 5 of 20: 500 each, with a standard deviation below 20.
    assert ((counts[:, :20] - 500).abs() < 100).all()
    assert not torch.equal(kept[:, 0], kept[:, 1])
    assert not torch.equal(kept, METHODS["random"](None, keys, seeds=range(2000), layer=4, **sizes))


def test_streaming_gives_up_sinks_before_the_buffer():
    kept = METHODS["streaming"](None, torch.zeros(1, 1, 12, 4), retain=6, buffer=4)
    assert kept.tolist() == [[[0, 1, 8, 9, 10, 11]]]
