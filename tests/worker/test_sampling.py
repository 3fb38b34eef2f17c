"""SamplingParams and the sampler, against transformers' logits processors and literal formulas."""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal

import msgspec
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvllm import LLM
from kvllm.core.protocol import SampledToken
from kvllm.errors import ConfigError
from kvllm.outputs import CompletionOutput, RequestOutput
from kvllm.sampling_params import SamplingParams
from kvllm.worker import model_runner, sampler
from kvllm.worker.draws import filter_logits
from kvllm.worker.penalties import penalize
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.sampler import SampleRows, uniform
from tests.helpers.examples import examples

MASK = 2**64 - 1


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def row_of(seed: int = 0, output: list[int] | None = None, prompt: list[int] | None = None, eos=(), **options):
    return SampleRow(SamplingParams(**options), seed, prompt or [], output or [], eos)


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
    return sampler.sample(logits, SampleRows(rows)).tokens()


def token_ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ([], [], False)
    assert params.skip_special_tokens and not params.include_stop_str_in_output


def test_options_have_one_spelling():
    params = SamplingParams(stop="end", top_k=-1, seed=-1, stop_token_ids=(3,))
    assert (params.stop, params.top_k, params.seed, params.stop_token_ids) == (["end"], 0, None, [3])
    assert type(SamplingParams(temperature=Decimal("0.5")).temperature) is float


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (1e-6, True), (1e-5, False), (1, False)])
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, math.nan, math.inf, 1e39, 1.1e6, 2.0**70, "0.7", True, None)),
        *(("top_p", value) for value in (0, 1.01, -1, math.nan, "1")),
        *(("top_k", value) for value in (-2, 2**63, 2**70, 1.5, True)),
        *(("min_p", value) for value in (-0.1, 1.1, math.nan)),
        *(("n", value) for value in (0, -1, 2**64, 1.0, True)),
        *(("seed", value) for value in (2**63, -(2**63) - 1, 1.5, "1")),
        *(("max_tokens", value) for value in (0, -1, 2**64, 2.5)),
        *(("min_tokens", value) for value in (-1, 17, 2**70, None)),
        *(("budget_tokens", value) for value in (0, 2**70, 1.5)),
        *(("retain_blocks", value) for value in (0, 2**70, 1.5)),
        *(("stop", value) for value in ("", ["a", ""], ["\ud800"], [1], 5)),
        *(("truncate_prompt_tokens", value) for value in (0, -2, 2**64, 1.5)),
        *(("output_kind", value) for value in (3, "DELTA")),
        *(("detokenize", value) for value in (1, None)),
        *(("stop_token_ids", value) for value in ([-1], [2**70], ["a"], 5)),
        *(("repetition_penalty", value) for value in (0, -1, 1e-7, 1e7, 1e39, math.inf, math.nan)),
        *(("presence_penalty", value) for value in (-2.1, 2.1, math.nan)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1, math.nan)),
        *(("logprobs", value) for value in (-2, 2**64, True, 1.5)),
        *(("prompt_logprobs", value) for value in (-2, 2**64, True, 1.5)),
        *(("logit_bias", value) for value in ({1: 100.5}, {1: math.nan}, {-1: 1.0}, {2**64: 1.0}, {"a": 1.0}, [1])),
        *(("allowed_token_ids", value) for value in ([], [-1], [2**64], ["a"], 5)),
        *(("bad_words", value) for value in ([""], [" "], ["\ud800"], [1], "word")),
        *(("bad_words_token_ids", value) for value in ([[]], [[-1]], [[2**64]], [1])),
        *(("ignore_eos", value) for value in (1, None, "yes")),
        *(("skip_special_tokens", value) for value in (0, None)),
    ],
)
def test_a_wrong_value_is_named(field, value):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{field: value})
    assert field in str(caught.value) and repr(value) in str(caught.value)


def test_no_token_is_asked_for_with_prompt_logprobs_alone():
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(ConfigError, match="min_tokens=1"):
        SamplingParams(max_tokens=0, prompt_logprobs=0, min_tokens=1)


def test_a_typo_is_named():
    with pytest.raises(ConfigError, match="temprature"):
        SamplingParams(temprature=0.5)


def test_params_travel_unchanged():
    params = SamplingParams(n=2, temperature=0.5, stop=["a", "b"], seed=-7, max_tokens=None, logprobs=3, top_k=5)
    tokens = SamplingParams(logit_bias={3: -100, 5: 0.5}, allowed_token_ids=[3, 5], bad_words_token_ids=[[1, 2], [3]])
    for each in (params, tokens):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=SamplingParams) == each


def test_outputs_have_sensible_defaults():
    completion = CompletionOutput(index=0, text="a", token_ids=[1])
    assert not completion.finished() and dataclasses.replace(completion, finish_reason="length").finished()
    first, second = (RequestOutput(str(i), None, [1], [completion], False) for i in range(2))
    assert first.error is None and first.metrics.preemptions == 0
    assert first.metrics is not second.metrics


def filtered_by_transformers(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, bool]:
    """The chain of `generate`: temperature, top-k, top-p, min-p. [V] float64.

    Also whether a token is so close to a bound that rounding may put it on either side.
    """
    close = False
    scores = TemperatureLogitsWarper(params.temperature)(None, logits.double().unsqueeze(0))
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        ascending = scores.sort().values.softmax(-1).cumsum(-1)
        close |= bool((ascending - (1 - params.top_p)).abs().min() < 1e-5)
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        ratios = (scores - scores.max()).exp()
        close |= bool((ratios - params.min_p).abs().min() < 1e-5)
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores[0], close


filters = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0.1, 5),
        "top_k": st.integers(1, 250),
        "top_p": st.floats(0.01, 0.99),
        "min_p": st.floats(0.01, 0.9),
    },
)


@settings(max_examples=examples(150))
@given(batch=st.lists(filters, min_size=1, max_size=4), seed=st.integers(0, 2**32 - 1), vocab=st.integers(2, 200))
def test_filters_agree_with_transformers(batch, seed, vocab):
    logits = random_logits(len(batch), vocab, seed)
    params = [SamplingParams(**options) for options in batch]
    filtered = [filtered_by_transformers(row, each) for row, each in zip(logits, params, strict=True)]
    assume(not any(close for _, close in filtered))
    expected = torch.stack([scores for scores, _ in filtered]).softmax(-1)
    filter_logits(logits, params)
    # Beside the filters, tokens less than 2**-35 times as probable as the most likely one are never drawn.
    assert torch.equal(logits.exp() > 1e-10, expected / expected.amax(-1, keepdim=True) > 1e-10)
    torch.testing.assert_close(logits.double().softmax(-1), expected, rtol=1e-4, atol=1e-6)


def test_equal_logits_stay_or_go_together():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0]]).repeat(3, 1)
    filter_logits(logits, [SamplingParams(top_k=2), SamplingParams(top_p=0.6), SamplingParams(top_k=3, top_p=0.99)])
    assert logits.isfinite().tolist() == [[False, True, True, True, True]] * 3


@settings(max_examples=examples(50))
@given(st.lists(st.integers(0, 49)), st.lists(st.integers(0, 49), min_size=1), st.floats(0.2, 3), st.integers(0, 1000))
def test_repetition_penalty_agrees_with_transformers(prompt, output, penalty, seed):
    logits = random_logits(1, 50, seed)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    penalize(logits, {0: row_of(prompt=prompt, output=output, repetition_penalty=penalty).penalties()})
    torch.testing.assert_close(logits, expected)


@settings(max_examples=examples(50))
@given(st.lists(st.integers(0, 9)), st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_penalties_follow_their_formula(output, presence, frequency):
    logits = random_logits(1, 10)
    expected = [
        value - frequency * output.count(token_id) - presence * (token_id in output)
        for token_id, value in enumerate(logits[0].tolist())
    ]
    row = row_of(prompt=[1, 2], output=output, presence_penalty=presence, frequency_penalty=frequency)
    penalize(logits, {0: row.penalties()})
    torch.testing.assert_close(logits[0], torch.tensor(expected))


def test_each_row_has_penalties_of_its_own():
    """Rows together as each alone, over a growing output; a row without penalties stays as it is."""
    options = [{"repetition_penalty": 1.3}, {}, {"frequency_penalty": 0.5}, {"presence_penalty": -1.0}]
    rows = [row_of(i, prompt=[1, i], **each) for i, each in enumerate(options)]
    for _ in range(5):
        logits = random_logits(4, 6, len(rows[0].output_token_ids))
        alone = logits.clone()
        penalize(logits, {i: rows[i].penalties() for i in (3, 0, 2)})
        for i in (0, 2, 3):
            fresh = row_of(i, rows[i].output_token_ids, rows[i].prompt_token_ids, **options[i])
            penalize(alone[i : i + 1], {0: fresh.penalties()})
        assert torch.equal(logits, alone)
        tokens = token_ids(sample(random_logits(4, 6, 99), rows))
        for row, token_id in zip(rows, tokens, strict=True):
            row.output_token_ids.append(token_id)


def test_a_greedy_row_takes_the_argmax_after_its_penalties():
    logits = torch.tensor([[1.0, 2.0, 1.9]]).repeat(3, 1)
    rows = [
        row_of(temperature=0, output=[1]),
        row_of(temperature=0, output=[1], frequency_penalty=0.2),
        row_of(temperature=0, prompt=[1], output=[2], repetition_penalty=2.0),
    ]
    assert token_ids(sample(logits, rows)) == [1, 2, 0]


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_min_tokens_forbids_stopping(temperature):
    logits = torch.tensor([[9.0, 0.0, 8.0, 0.0]])
    options = {"temperature": temperature, "min_tokens": 2, "stop_token_ids": [2, 10_000], "eos": (0, 5)}
    for seed in range(50):
        for output, allowed in ([], {1, 3}), ([1], {1, 3}), ([1, 1], {0, 2}):
            assert token_ids(sample(logits, [row_of(seed, output, **options)]))[0] in allowed


def test_plain_rows_take_tokens_that_are_known():
    """Other rows have their own, and what is known stays as it is."""
    logits, known = random_logits(3, 50), torch.tensor([7, 8, 9])
    rows = [row_of(temperature=0), row_of(temperature=0, logit_bias={4: 100}), row_of(temperature=0)]
    found = sampler.sample(logits, SampleRows(rows), known)
    assert token_ids(found.tokens()) == [7, 4, 9] and known.tolist() == [7, 8, 9]


def test_samples_outlive_the_memory_of_known_tokens():
    """A graph writes the most likely tokens of the next step where those of the last one lay."""
    known = torch.tensor([3, 1])
    samples = sampler.sample(random_logits(2, 8), SampleRows([row_of(temperature=0), row_of(temperature=0)]), known)
    known.zero_()
    assert samples.token_ids().tolist() == token_ids(samples.tokens()) == [3, 1]


def test_min_tokens_leaves_a_token_to_choose():
    tokens = sample(torch.zeros(1, 3), [row_of(min_tokens=1, eos=(0, 1, 2))])
    assert tokens[0].token_id in range(3)


@pytest.mark.parametrize(
    ("options", "varied"),
    [
        ({}, "seed"),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, "position"),
        ({"temperature": 1.5, "top_p": 0.8}, "seed"),
        ({"min_p": 0.1}, "position"),
    ],
)
def test_draws_follow_the_distribution(options, varied):
    vocab, draws = 30, 20_000
    logits = random_logits(1, vocab, seed=1) / 2
    params = SamplingParams(**options)
    outputs = [[0] * i for i in range(1000)]
    rows = [
        SampleRow(params, i, [], []) if varied == "seed" else SampleRow(params, i // 1000, [], outputs[i % 1000])
        for i in range(draws)
    ]
    counts = torch.tensor(token_ids(sample(logits.expand(draws, -1), rows))).bincount(minlength=vocab).double()
    expected = filtered_by_transformers(logits[0], params)[0].softmax(-1) * draws
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = torch.tensor((int(kept.sum()) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, statistic / 2) > 1e-3


def test_uniform_is_spread_evenly_and_uncorrelated():
    by_seed = torch.tensor([uniform(seed, 0) for seed in range(20_000)])
    by_position = torch.tensor([uniform(0, position) for position in range(20_000)])
    for values in by_seed, by_position:
        counts = values.histc(100, 0, 1)
        assert ((counts - 200) ** 2 / 200).sum() < 160  # chi-square, 99 degrees of freedom: p > 1e-4
        assert torch.corrcoef(torch.stack([values[1:], values[:-1]]))[0, 1].abs() < 0.03
    assert torch.corrcoef(torch.stack([by_seed, by_position]))[0, 1].abs() < 0.03
    # A seed one SplitMix64 increment further must not replay the same numbers one position later.
    assert uniform(1 + 0x9E3779B97F4A7C15, 0) != uniform(1, 1)


def undo_xor_shift(value: int, shift: int) -> int:
    result = value
    for _ in range(64 // shift):
        result = value ^ (result >> shift)
    return result


def unmix(state: int) -> int:
    """The inverse of SplitMix64's step, to construct seeds whose hash is extreme."""
    state = undo_xor_shift(state, 31) * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    state = undo_xor_shift(state, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return undo_xor_shift(state, 30) - 0x9E3779B97F4A7C15 & MASK


LOWEST_SEED, HIGHEST_SEED = unmix(unmix(0)), unmix(unmix(MASK))


def test_the_most_extreme_draws_stay_inside():
    assert 0 < uniform(LOWEST_SEED, 0) < 1e-15
    assert 1 - 1e-15 < uniform(HIGHEST_SEED, 0) < 1
    impossible = [-math.inf] * 3
    logits = torch.tensor([[*impossible, 0.0, 0.5, -1.0, *impossible, -200.0]]).repeat(2, 1)
    for options in {}, {"top_k": 4}, {"top_p": 0.999}, {"top_k": 10, "top_p": 0.999, "min_p": 0.01}:
        rows = [row_of(LOWEST_SEED, **options), row_of(HIGHEST_SEED, **options)]
        assert token_ids(sample(logits, rows)) == [3, 5]


@settings(max_examples=examples(100))
@example(values=[1e35, 2e35], options={"temperature": 0.5, "repetition_penalty": 1e-6}, seed=0)
@given(
    values=st.lists(st.one_of(st.floats(-50, 50, width=32), st.just(-math.inf)), min_size=1, max_size=20),
    options=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0, 1e-5, 0.5, 1e6]),
            "top_k": st.integers(-1, 30).filter(bool),
            "top_p": st.sampled_from([1e-300, 0.1, 1 - 1e-16]),
            "min_p": st.sampled_from([1e-300, 0.5, 1.0]),
            "repetition_penalty": st.sampled_from([1e-6, 0.5, 1e6]),
            "presence_penalty": st.just(2),
        },
    ),
    seed=st.sampled_from([LOWEST_SEED, HIGHEST_SEED, 0, -1]),
)
def test_extreme_options_still_pick_a_possible_token(values, options, seed):
    assume(max(values) > -math.inf)
    # What was generated before was possible.
    output = [token_id for token_id, value in enumerate(values) if value > -math.inf]
    token_id = sample(torch.tensor([values]), [row_of(seed, output, **options)])[0].token_id
    assert values[token_id] > -math.inf


def mixed_rows(count: int, vocab: int) -> list[SampleRow]:
    kinds = [
        {"temperature": 0},
        {},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "logprobs": 3},
        {"top_p": 0.9, "logprobs": 0},
        {"min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 0, "frequency_penalty": 0.5, "logprobs": 5},
        {"top_k": 700, "min_tokens": 30, "max_tokens": 50},
    ]
    return [
        row_of(seed=i, prompt=[i % vocab], output=list(range(i % 50)), eos=(7,), **kinds[i % len(kinds)])
        for i in range(count)
    ]


@pytest.mark.parametrize("rows_at_once", [10, 1000])
def test_a_row_does_not_depend_on_its_batch(monkeypatch, rows_at_once):
    vocab = 5003
    monkeypatch.setattr(sampler, "LOGITS_AT_ONCE", rows_at_once * vocab)
    rows = mixed_rows(70, vocab)
    logits = random_logits(len(rows), vocab).bfloat16().float()  # rounded, as a model's: many are equal
    untouched = logits.clone()
    together = sample(logits, rows)
    assert torch.equal(logits, untouched)
    assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()[:-3]
    assert [together[i] for i in order] == sample(logits[order], [rows[i] for i in order])


def test_a_seed_reproduces_its_tokens_and_another_does_not():
    logits = random_logits(40, 1000)

    def tokens(seed: int) -> list[int]:
        return token_ids(sample(logits, [row_of(seed, [0] * i) for i in range(40)]))

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 1}, {"top_p": 0.9}, {"temperature": 0}, {"temperature": 0, "presence_penalty": 1.0}],
    ids=str,
)
def test_logits_that_are_not_finite_are_an_error_of_their_row(options):
    for bad in [math.nan, 0.0], [0.0, math.nan], [math.inf, 0.0]:
        good, broken = sample(torch.tensor([[0.0, 1.0], bad]), [row_of(), row_of(output=[1], **options)])
        assert good.error is None and "not finite" in broken.error


def test_a_greedy_row_takes_the_first_of_equal_logits():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, -math.inf, 3.0, 3.0]])
    assert token_ids(sample(logits, [row_of(temperature=0)] * 2)) == [1, 0]


def unchecked(params: SamplingParams, **options) -> SamplingParams:
    """Options that SamplingParams would refuse."""
    for name, value in options.items():
        msgspec.structs.force_setattr(params, name, value)
    return params


@pytest.mark.parametrize("options", [{"logprobs": 11}, {"top_p": "much"}, {"stop_token_ids": [None]}])
def test_what_one_row_breaks_is_an_error_of_that_row(options):
    logits = random_logits(3, 10)
    plain = sample(logits, [row_of(seed=i, top_p=0.9, min_tokens=2) for i in range(3)])
    rows = [row_of(seed=i, top_p=0.9, min_tokens=2) for i in range(3)]
    unchecked(rows[1].params, **options)
    first, broken, last = sample(logits, rows)
    assert [first, last] == [plain[0], plain[2]] and "no token could be sampled" in broken.error


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.3, "top_k": 5, "repetition_penalty": 1.5}])
def test_logprobs_are_those_of_the_untouched_logits(options):
    logits = random_logits(8, 5003)
    rows = [row_of(seed=i, output=[1, 2], logprobs=4, **options) for i in range(8)]
    expected = logits.log_softmax(-1)
    for token, row in zip(sample(logits, rows), expected, strict=True):
        assert token.logprob == pytest.approx(row[token.token_id].item(), abs=1e-5)
        assert token.rank == (row > row[token.token_id]).sum() + 1
        top = row.topk(4)
        assert [token_id for token_id, _ in token.top_logprobs] == top.indices.tolist()
        assert [value for _, value in token.top_logprobs] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_logprobs_only_where_asked():
    plain, zero = sample(random_logits(2, 10), [row_of(), row_of(logprobs=0)])
    assert plain == SampledToken(plain.token_id)
    assert zero.top_logprobs == [] and zero.logprob < 0


def test_rows_that_ask_for_equally_many_are_reported_in_one_pass_of_bounded_size(monkeypatch):
    sizes, report = [], sampler.report
    monkeypatch.setattr(sampler, "LOGITS_AT_ONCE", 10 * 50)
    monkeypatch.setattr(sampler, "report", lambda *args: (sizes.append((len(args[0]), args[2])), report(*args))[1])
    logits, rows = random_logits(40, 50), [row_of(seed=i, logprobs=i % 4 or None) for i in range(40)]
    unchecked(rows[1].params, top_p="much")
    tokens = sample(logits, rows)
    assert sizes == [(9, 1), (10, 2), (10, 3)] and tokens[1].error
    numbers = [len(token.top_logprobs or ()) for token in tokens]
    assert numbers == [0, 0, *[i % 4 for i in range(2, 40)]]


# Bias, allowed tokens and bad words


def test_bias_is_added_to_logits():
    logits = random_logits(2, 50, seed=4)
    bias = {3: 5.0, 7: -100.0, 11: 0.25}
    biased = logits.clone()
    biased[:, list(bias)] += torch.tensor(list(bias.values()))
    for options in ({"temperature": 0}, {"temperature": 0.7}, {"temperature": 0, "repetition_penalty": 1.5}):
        plain = [row_of(seed=9, output=[3, 4], **options) for _ in range(2)]
        rows = [row_of(seed=9, output=[3, 4], logit_bias=bias, **options), plain[1]]
        assert token_ids(sample(logits, rows)) == [
            token_ids(sample(biased, plain))[0],
            token_ids(sample(logits, plain))[1],
        ]
    forced = [row_of(temperature=0, logit_bias={token: 100}) for token in (13, 49)]
    assert token_ids(sample(logits, forced)) == [13, 49]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_other_tokens_than_the_allowed_never_come(temperature):
    logits = random_logits(200, 30, seed=5)
    rows = [row_of(seed=i, temperature=temperature, allowed_token_ids=[4, 9, 21]) for i in range(200)]
    drawn = token_ids(sample(logits, rows))
    best = [max((4, 9, 21), key=lambda token: row[token]) for row in logits]
    assert set(drawn) == {4, 9, 21} and (temperature or drawn == best)
    reported = [row_of(temperature=0, allowed_token_ids=[4], logprobs=0)]
    assert sample(logits[:1], reported)[0].logprob == pytest.approx(logits[0].log_softmax(-1)[4].item(), abs=1e-5)


@pytest.mark.parametrize("allowed", [None, [2, 3, 5]], ids=["all allowed", "some allowed"])
@pytest.mark.parametrize(
    ("words", "output", "expected"),
    [
        ([[5]], [], 3),
        ([[5], [3]], [1, 2], 2),
        ([[1, 5]], [], 5),
        ([[1, 5]], [1], 3),
        ([[1, 5]], [5], 5),
        ([[4, 1, 5], [1, 3]], [4, 1], 2),
        ([[4, 1, 5]], [1], 5),
    ],
)
def test_the_last_token_of_a_bad_word_does_not_come(words, output, expected, allowed):
    logits = torch.tensor([[0.0, 0.0, 2.0, 3.0, 1.0, 5.0]])
    row = row_of(temperature=0, bad_words_token_ids=words, output=output, allowed_token_ids=allowed)
    assert token_ids(sample(logits, [row])) == [expected]


def test_some_token_comes_whatever_is_forbidden():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    for options, expected in (
        ({"bad_words_token_ids": [[0], [1], [2]]}, 2),
        ({"allowed_token_ids": [1], "bad_words_token_ids": [[1]]}, 1),
        ({"allowed_token_ids": [0, 1], "stop_token_ids": [0, 1], "min_tokens": 3}, 1),
        ({"bad_words_token_ids": [[2]], "stop_token_ids": [0, 1], "min_tokens": 3}, 1),
    ):
        assert token_ids(sample(logits, [row_of(temperature=0, **options)])) == [expected]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"temperature": 0}, torch.bfloat16),
        ({"temperature": 0, "logprobs": 1}, torch.float32),
        ({"temperature": 0, "presence_penalty": 0.5}, torch.float32),
        ({"temperature": 1.0, "seed": 0}, torch.float32),
    ],
    ids=str,
)
def test_logits_are_widened_where_more_than_the_largest_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, float], dtype: torch.dtype
) -> None:
    """In steps that only decode; the first token comes from a prompt."""
    found = []
    sample = model_runner.sample
    monkeypatch.setattr(model_runner, "sample", lambda *args: (found.append(args[0].dtype), sample(*args))[1])
    llm = LLM(num_gpu_blocks_override=4, dtype="bfloat16")
    llm.generate(["2"], SamplingParams(max_tokens=3, ignore_eos=True, **options), use_tqdm=False)
    assert found == [torch.float32, dtype, dtype]
