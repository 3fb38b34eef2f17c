from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvllm.compression import mass
from kvllm.compression.methods import kara, token2chunk
from kvllm.compression.registry import METHODS
from tests.helpers.examples import examples
from tests.helpers.literal_kara import dense_scores, literal_token2chunk, window_tensors

CLOSE = {"rtol": 1e-4, "atol": 0.0, "check_dtype": False}


def stack(arrays, names, field):
    return torch.stack([torch.from_numpy(arrays[f"{name}_{field}"]) for name in names])


def expected(arrays, name, field):
    return torch.from_numpy(arrays[f"{name}_{field}"])


# Golden vectors


def test_scores_match_the_vectors(load_vectors):
    arrays, meta = load_vectors("kara_scores")
    for i, case in enumerate(meta["cases"]):
        queries, keys = stack(arrays, [f"c{i}"], "q"), stack(arrays, [f"c{i}"], "k")
        buffer, group = case["U"], case["Hq"] // case["Hkv"]
        scores = kara.scores(queries, keys, buffer)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores[0], expected(arrays, f"c{i}", "scores_sum"), **CLOSE)
        torch.testing.assert_close(scores[0] / group, expected(arrays, f"c{i}", "scores_mean"), **CLOSE)
        buffer_only = kara.scores(queries[:, :, -buffer:], keys, buffer)
        torch.testing.assert_close(buffer_only[0], expected(arrays, f"c{i}", "scores_nobi"), **CLOSE)


def test_budget_matches_the_vectors(load_vectors):
    arrays, _ = load_vectors("kara_budget")
    for _, buffer, tenths, chunk_budget, num_scored, total, candidates, _ in arrays["table"].tolist():
        retention = Fraction(257 - buffer, num_scored) if tenths == -1 else Fraction(tenths, 10)
        assert kara.budget(num_scored, retention, chunk_budget) == (total, candidates)
    for retention, (num_scored, chunk_budget, total, candidates) in zip(
        arrays["extra_r"].tolist(), arrays["extra"].tolist(), strict=True
    ):
        assert kara.budget(num_scored, retention, chunk_budget) == (total, candidates)


@pytest.mark.parametrize("name", ["kara_indices_mha", "kara_indices_gqa2", "kara_indices_gqa4"])
def test_indices_match_the_vectors(load_vectors, name):
    arrays, meta = load_vectors(name)
    names = [f"c{i}" for i in range(len(meta["cases"]))]
    queries, keys = stack(arrays, names, "q"), stack(arrays, names, "k")
    for i, case in enumerate(meta["cases"]):
        buffer, alpha, gamma = case["U"], case["alpha"], case["gamma"]
        total, num_candidates = kara.budget(case["W"] - buffer, case["r"], alpha)
        scores = kara.scores(queries, keys, buffer)
        torch.testing.assert_close(scores[i], expected(arrays, f"c{i}", "scores"), **CLOSE)
        assert torch.equal(token2chunk.top_indices(scores, num_candidates)[i], expected(arrays, f"c{i}", "cand"))
        assert torch.equal(token2chunk.expand(scores, total, alpha, gamma)[i], expected(arrays, f"c{i}", "kept"))
        options = {"retain": total + buffer, "buffer": buffer, "chunk_budget": alpha, "max_chunk": gamma}
        selected = METHODS["kara"](queries, keys, **options)
        assert selected.dtype == torch.int64
        assert torch.equal(selected[i], expected(arrays, f"c{i}", "window_kept"))
        alone = [kara.select(queries[j : j + 1], keys[j : j + 1], **options) for j in range(len(names))]
        assert torch.equal(selected, torch.cat(alone))


@pytest.mark.parametrize("name", ["kara_kvllm_768_a32", "kara_kvllm_768_a16"])
def test_serving_window_matches_the_vectors(load_vectors, name):
    arrays, meta = load_vectors(name)
    queries, keys = stack(arrays, ["c0"], "q"), stack(arrays, ["c0"], "k")
    torch.testing.assert_close(kara.scores(queries, keys, meta["U"])[0], expected(arrays, "c0", "scores"), **CLOSE)
    selected = kara.select(
        queries,
        keys,
        retain=meta["keep_total"],
        buffer=meta["U"],
        chunk_budget=meta["alpha"],
        max_chunk=meta["gamma"],
    )
    assert torch.equal(selected[0], expected(arrays, "c0", "window_kept"))


def test_ablations_match_the_vectors(load_vectors):
    arrays, meta = load_vectors("kara_ablations")
    assert {case["variant"] for case in meta["cases"]} == {"no_bi", "no_t2c"}
    for i, case in enumerate(meta["cases"]):
        queries, keys = stack(arrays, [f"c{i}"], "q"), stack(arrays, [f"c{i}"], "k")
        buffer, chunk_budget = case["U"], case["alpha"]
        total, _ = kara.budget(case["W"] - buffer, case["r"], chunk_budget)
        if case["variant"] == "no_bi":
            queries = queries[:, :, -buffer:]
        else:
            chunk_budget = 0
        torch.testing.assert_close(kara.scores(queries, keys, buffer)[0], expected(arrays, f"c{i}", "scores"), **CLOSE)
        selected = kara.select(
            queries, keys, retain=total + buffer, buffer=buffer, chunk_budget=chunk_budget, max_chunk=case["gamma"]
        )
        assert torch.equal(selected[0], expected(arrays, f"c{i}", "window_kept")), case


def test_token2chunk_matches_the_vectors(load_vectors):
    arrays, meta = load_vectors("token2chunk")
    for i, case in enumerate(meta["cases"]):
        scores, total = expected(arrays, f"c{i}", "A"), case["candidates"] + case["alpha"]
        kept = token2chunk.expand(scores, total, case["alpha"], case["gamma"])
        assert torch.equal(kept, expected(arrays, f"c{i}", "kept")), case["what"]


# Token2Chunk on its own


@st.composite
def token2chunk_inputs(draw):
    n = draw(st.integers(1, 60))
    rows = draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([1, 2, 3, 6, None]))  # few levels: almost everything ties
    scores = random.random((rows, n)) if levels is None else random.integers(0, levels, (rows, n))
    scores = scores - draw(st.sampled_from([0, 3]))  # below zero, adjacent candidates would have the best reward
    total = draw(st.integers(0, n + 2))
    return torch.from_numpy(scores.astype(np.float32)), total, draw(st.integers(0, 20)), draw(st.integers(3, 9))


@settings(max_examples=examples(400))
@given(token2chunk_inputs())
def test_token2chunk_equals_the_text(inputs):
    scores, total, chunk_budget, max_chunk = inputs
    kept = token2chunk.expand(scores, total, chunk_budget, max_chunk)
    for row, row_scores in zip(kept.tolist(), scores.numpy(), strict=True):
        assert row == literal_token2chunk(row_scores, total, chunk_budget, max_chunk)


@settings(max_examples=examples(100))
@given(token2chunk_inputs())
def test_token2chunk_keeps_its_promises(inputs):
    scores, total, chunk_budget, max_chunk = inputs
    n = scores.shape[-1]
    kept = token2chunk.expand(scores, total, chunk_budget, max_chunk)
    assert kept.dtype == torch.int64 and kept.shape == (len(scores), min(total, n))
    assert (kept.diff(dim=-1) > 0).all() and ((kept >= 0) & (kept < n)).all()
    for row, candidates in zip(kept, token2chunk.top_indices(scores, max(total - chunk_budget, 0)), strict=True):
        assert torch.isin(candidates, row).all()
    plain = token2chunk.top_indices(scores, total)
    assert torch.equal(token2chunk.expand(scores, total, 0, max_chunk), plain)
    if chunk_budget < max_chunk - 2:
        assert torch.equal(kept, plain)
    nested = token2chunk.expand(torch.stack((scores, scores.flip(0))), total, chunk_budget, max_chunk)
    assert torch.equal(nested, torch.stack((kept, kept.flip(0))))


def test_token2chunk_rejects_impossible_settings():
    scores = torch.rand(8)
    for total, chunk_budget, max_chunk in ((-1, 0, 8), (4, -1, 8), (4, 2, 2)):
        with pytest.raises(ValueError, match=f"max_chunk={max_chunk}"):
            token2chunk.expand(scores, total, chunk_budget, max_chunk)


# Scores and selection


@st.composite
def windows(draw):
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    window = draw(st.integers(2, 48))
    queries, keys = window_tensors(
        draw(st.integers(0, 2**31)), draw(st.integers(1, 4)), num_kv_heads * group, num_kv_heads, window, 16,
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )  # fmt: skip
    return queries, keys, draw(st.integers(0, window - 1))


@settings(max_examples=examples(60))
@given(windows(), st.integers(1, 5))
def test_scores_equal_dense_attention_over_the_chosen_rows(window, stride):
    queries, keys, buffer = window
    queries = queries[:, :, (queries.shape[2] - 1) % stride :: stride]
    scores = kara.scores(queries, keys, buffer)
    torch.testing.assert_close(scores, dense_scores(queries, keys, buffer), **CLOSE)
    mass = torch.full(scores.shape[:2], queries.shape[2] * queries.shape[1] / keys.shape[1])
    torch.testing.assert_close(scores.sum(dim=-1), mass, rtol=1e-5, atol=0.0)


@settings(max_examples=examples(60))
@given(windows(), st.data())
def test_selection_keeps_its_promises(window, data):
    queries, keys, buffer = window
    length = keys.shape[2]
    retain, chunk_budget = data.draw(st.integers(buffer, length)), data.draw(st.integers(0, 16))
    kept = kara.select(queries, keys, retain=retain, buffer=buffer, chunk_budget=chunk_budget, max_chunk=6)
    assert kept.dtype == torch.int64 and kept.shape == (*keys.shape[:2], retain)
    assert (kept.diff(dim=-1) > 0).all() and ((kept >= 0) & (kept < length)).all()
    everything = torch.arange(length).expand(*keys.shape[:2], length)
    assert torch.equal(kept[..., retain - buffer :], everything[..., length - buffer :])
    for no_op, protected in ((length, buffer), (length + 1, buffer), (length, length)):
        kept_all = kara.select(queries, keys, retain=no_op, buffer=protected, chunk_budget=chunk_budget, max_chunk=6)
        assert torch.equal(kept_all, everything)
    plain = kara.select(queries, keys, retain=retain, buffer=buffer, chunk_budget=0, max_chunk=6)
    best = token2chunk.top_indices(kara.scores(queries, keys, buffer), retain - buffer)
    assert torch.equal(plain[..., : retain - buffer], best)


@settings(max_examples=examples(40))
@given(windows())
def test_batch_mates_and_other_heads_change_no_bit(window):
    assert_invariant(*window)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "length", "num_threads"), [(8, 2, 384, 1), (12, 4, 501, 1), (8, 8, 256, 2)]
)
def test_batch_mates_and_other_heads_change_no_bit_in_real_windows(num_heads, num_kv_heads, length, num_threads):
    torch.set_num_threads(num_threads)
    queries, keys = window_tensors(length, 3, num_heads, num_kv_heads, length, 64, torch.bfloat16)
    torch.testing.assert_close(kara.scores(queries, keys, 32), dense_scores(queries, keys, 32), **CLOSE)
    assert_invariant(queries, keys, 32)


def assert_invariant(queries, keys, buffer):
    """The same bits alone, in another order, with fewer heads (tensor parallel) and in another memory layout."""
    scores = kara.scores(queries, keys, buffer)
    num_seqs, num_kv_heads = keys.shape[:2]
    group = queries.shape[1] // num_kv_heads
    for i in range(num_seqs):
        assert torch.equal(kara.scores(queries[i : i + 1], keys[i : i + 1], buffer)[0], scores[i])
    assert torch.equal(kara.scores(queries.flip(0), keys.flip(0), buffer).flip(0), scores)
    for g in range(num_kv_heads):
        own = queries[:, g * group : (g + 1) * group]
        assert torch.equal(kara.scores(own, keys[:, g : g + 1], buffer)[:, 0], scores[:, g])
    by_token = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (queries, keys)]
    assert torch.equal(kara.scores(*by_token, buffer), scores)
    torch.testing.assert_close(kara.scores(queries.float(), keys.float(), buffer), scores, **CLOSE)
    scored = keys[:, :, : keys.shape[2] - buffer]
    with_torch = [mass.attention_mass(*each) for each in zip(queries, scored, strict=True)]
    torch.testing.assert_close(torch.stack(with_torch), scores, **CLOSE)


def test_buffer_keys_are_not_scored():
    queries, keys = window_tensors(0, 2, 4, 2, 40, 16)
    scores = kara.scores(queries, keys, 8)
    keys[:, :, -8:] = torch.inf
    assert torch.equal(kara.scores(queries, keys, 8), scores)


def test_inputs_are_left_alone_and_gradients_are_not_tracked():
    queries, keys = window_tensors(1, 1, 4, 2, 32, 16)
    before = queries.clone(), keys.clone()
    scores = kara.scores(queries.requires_grad_(), keys.requires_grad_(), 4)
    assert not scores.requires_grad
    assert torch.equal(queries, before[0]) and torch.equal(keys, before[1])


@pytest.mark.gpu
def test_cuda_selects_the_same_as_cpu(load_vectors):
    arrays, meta = load_vectors("kara_kvllm_768_a32")
    queries, keys = stack(arrays, ["c0"], "q").cuda(), stack(arrays, ["c0"], "k").cuda()
    selected = kara.select(
        queries, keys, retain=257, buffer=meta["U"], chunk_budget=meta["alpha"], max_chunk=meta["gamma"]
    )
    assert torch.equal(selected[0].cpu(), expected(arrays, "c0", "window_kept"))


def test_misuse_is_reported():
    queries, keys = window_tensors(3, 2, 4, 2, 16, 8)
    options = {"chunk_budget": 4, "max_chunk": 8}
    with pytest.raises(ValueError, match="buffer=9"):
        kara.select(queries, keys, retain=8, buffer=9, **options)
    with pytest.raises(ValueError, match="buffer=17"):
        kara.select(queries, keys, retain=20, buffer=17, **options)
    with pytest.raises(ValueError, match="Hq a multiple of Hkv"):
        kara.select(queries[:, :3], keys, retain=8, buffer=4, **options)
    with pytest.raises(ValueError, match="at least one query token"):
        kara.select(queries[:, :, :0], keys, retain=8, buffer=4, **options)
    with pytest.raises(ValueError, match="to score"):
        kara.scores(queries, keys, 16)
    for retention in (0.3, "1.1", -1):
        with pytest.raises(ValueError, match="retention="):
            kara.budget(100, retention, 4)
