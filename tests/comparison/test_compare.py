"""`kvllm compare`: figures known from elsewhere, equal memory, what is refused, and going on after an interrupt."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kvllm import CompressionConfig
from kvllm.comparison import measurement
from kvllm.comparison.equal_memory import BLOCK_SIZE, fit, target
from kvllm.comparison.figures import mean_of, t_quantile
from kvllm.comparison.measurement import Result
from kvllm.comparison.needles import hide
from kvllm.comparison.predictions import sampled_positions
from kvllm.comparison.report import on_a_command_line
from kvllm.comparison.texts import Text, read_questions
from kvllm.compression.specs import SPECS
from kvllm.core.policies import Standalone
from kvllm.entrypoints import cli
from kvllm.entrypoints.engine_flags import parse_compression
from tests.helpers.checkpoints import make_checkpoint, make_parrot
from tests.helpers.dense_decoder import DenseDecoder
from tests.helpers.literal_streaming import streaming_cache
from tests.helpers.tokenizers import TEXTS, byte_level

LENGTH, PROMPT = 260, 20
SHORT = ["--length", str(LENGTH), "--prompt-tokens", str(PROMPT), "--kv-cache-dtypes", "auto"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level("plain")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    path = tmp_path_factory.mktemp("random")
    make_checkpoint(path, "qwen3", vocab_size=len(tokenizer.hf), head_dim=16, num_hidden_layers=2)
    tokenizer.hf.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two files of random words."""
    words = " ".join(TEXTS[:2]).split()
    paths = [tmp_path_factory.mktemp("texts") / name for name in ("first.txt", "second.txt")]
    for seed, path in enumerate(paths):
        path.write_text(" ".join(random.Random(seed).choices(words, k=400)))
    return [str(path) for path in paths]


def compare(model: Path, output: Path, *options: str) -> dict[str, Any]:
    cli.main(["compare", str(model), "--output", str(output), *SHORT, *options])
    return json.loads((output / "compare.json").read_text())


# Figures


def test_nothing_is_lost_where_all_is_kept(checkpoint: Path, texts: list[str], tmp_path: Path, capsys) -> None:
    options = ["--pieces", "2", "--memory", "1", "--methods", "snapkv", "kara", "--needles", "1"]
    found = compare(checkpoint, tmp_path, "--text", *texts, *options)
    full = found["variants"]["all pairs"]
    assert [text["kind"] for text in found["texts"]] == ["first", "second"]
    assert {"random 100%", "streaming 100%", "snapkv 100%", "kara 100%"} < set(found["variants"])
    for name, result in found["variants"].items():
        assert result["pairs_share"] == 1, name
        assert [piece["nll"] for piece in result["pieces"]] == pytest.approx([p["nll"] for p in full["pieces"]], 1e-6)
        assert all(abs(piece["kl"]) < 1e-9 and piece["same_top"] == 1 for piece in result["pieces"]), name
        assert result["needles"]["found_in_output"] == full["needles"]["found_in_output"] == 0
    assert full["bytes_share"] == 1
    assert "100.0% of the bytes: all pairs (100.0%), KL 0.0000" in capsys.readouterr().out


def test_divergence_is_that_of_dense_attention(checkpoint: Path, texts: list[str], tmp_path: Path) -> None:
    found = compare(checkpoint, tmp_path, "--text", *texts, "--pieces", "2", "--memory", "0.5", "--methods", "random")
    result, decoder = found["variants"]["streaming 50%"], DenseDecoder(checkpoint)
    options = result["compression"]["policy"]
    budget, gap = options["budget_tokens"], options["threshold_tokens"] - options["budget_tokens"]
    for text, piece in zip(found["texts"], result["pieces"], strict=True):
        visible = streaming_cache(PROMPT, LENGTH - PROMPT, budget, gap, protected=2 * BLOCK_SIZE)
        assert piece["pairs"] == len(visible[-1]) and piece["all_pairs"] == LENGTH - 1
        tokens = [*text["prompt"], *text["output"][:-1]]
        full = torch.ones(decoder.num_layers, 2, len(tokens), len(tokens), dtype=torch.bool).tril()
        less = full.clone()
        for row, positions in enumerate(visible, start=PROMPT):
            less[..., row, :] = False
            less[..., row, positions] = True
        p, q = (decoder.forward(tokens, mask).logits[PROMPT - 1 :].log_softmax(-1) for mask in (full, less))
        divergence = (p.exp() * (p - q)).sum(-1)
        last = divergence[-(LENGTH - PROMPT) // 4 :]
        assert divergence.mean() > 0.01
        assert piece["kl"] == pytest.approx(divergence.mean().item(), rel=2e-3)
        assert piece["kl_last_quarter"] == pytest.approx(last.mean().item(), rel=2e-3)
        nll = -q.gather(1, torch.tensor(text["output"])[:, None]).mean()
        assert piece["nll"] == pytest.approx(nll.item(), rel=1e-4)
        assert piece["same_top"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())


def test_intervals() -> None:
    assert [t_quantile(n) for n in (1, 7, 30)] == pytest.approx([12.706, 2.365, 2.042], abs=2e-3)
    found = mean_of([1.0, 2.0, 4.0])
    assert (found.mean, found.half_width) == pytest.approx((7 / 3, 4.303 * 1.5275 / 3**0.5), rel=1e-3)
    assert mean_of([1.0]).half_width is None


def test_sampled_positions() -> None:
    assert sampled_positions(40).tolist() == list(range(40))
    found = sampled_positions(4000)
    assert len(found) == 512 and sum(found >= 3000) == 256 and found[0] == 0 and found[-1] == 3999


# Equal memory


@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize("method", [*SPECS, "snapkv:windows"])
def test_all_methods_end_with_as_many_pairs(method: str, length: int) -> None:
    for share in (0.5, 0.25):
        fitted = fit(method, share, [(64, length - 1)] * 3)
        budget = fitted.budget((64, length - 1))
        compression = fitted.compression
        assert isinstance(compression.policy, Standalone) or not method.endswith(":windows")
        assert budget == getattr(compression.policy, "budget_tokens", None)
        *_, held = compression.regions(fitted.block_size).cached_lengths(64, length - 1, 64)
        assert abs(held - target(share, length - 1)) < BLOCK_SIZE, (share, held)


@pytest.mark.long
def test_engines_hold_what_was_asked_for(texts: list[str], tokenizer: Any, tmp_path: Path, capsys) -> None:
    make_checkpoint(tmp_path, "qwen3", vocab_size=len(tokenizer.hf), head_dim=32, num_hidden_layers=2)
    tokenizer.hf.save_pretrained(tmp_path)
    methods = ["kara", "mean_attention", "adakv", "h2o"]
    options = [
        "--pieces",
        "3",
        "--memory",
        "0.4",
        "0.2",
        "--methods",
        *methods,
        "--needles",
        "0",
        "--dtype",
        "bfloat16",
    ]
    options += ["--kv-cache-dtypes", "auto", "int8", "int4"]
    found = compare(tmp_path, tmp_path / "out", "--text", *texts, *options)["variants"]
    full, int8, int4, *others = found.values()
    assert full["bytes_share"] == 1 and int8["memory"] == int8["bytes_share"] > 0.4 > int4["bytes_share"] > 0
    dtypes = {(each["memory"], each["kv_cache_dtype"]) for each in others}
    assert dtypes == {(0.4, "auto"), (0.4, "int8"), (0.2, "auto"), (0.2, "int8"), (0.2, "int4")}
    others = [each for each in others if not each["refused"]]
    assert len(others) > len(methods) * 4
    for result in others:
        wanted = result["share"] * (LENGTH - 1)
        assert all(abs(piece["pairs"] - wanted) < BLOCK_SIZE for piece in result["pieces"]), result["name"]
        assert result["bytes_share"] == pytest.approx(result["memory"], abs=BLOCK_SIZE / LENGTH), result["name"]
    shown = capsys.readouterr().out
    best = next(line for line in shown.splitlines() if "kvllm serve" in line and "--compression" in line)
    settings = parse_compression(best.split("--compression ")[1])
    made = [each["compression"] for each in found.values() if each["compression"]]
    assert settings in [msgspec.convert(each, CompressionConfig) for each in made]


# What is refused


def test_refused_variants_have_rows(texts: list[str], tokenizer: Any, tmp_path: Path, capsys) -> None:
    kinds = ["sliding_attention", "full_attention"]
    options: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 32, "layer_types": kinds}
    size = len(tokenizer.hf)
    make_checkpoint(tmp_path, "qwen3", vocab_size=size, head_dim=16, num_hidden_layers=2, **options)
    tokenizer.hf.save_pretrained(tmp_path)
    names = ["kara", "h2o", "keydiff", "triattention"]
    more = ["--pieces", "1", "--memory", "0.5", "0.1", "--methods", *names, "--needles", "1"]
    found = compare(tmp_path, tmp_path / "out", "--text", texts[0], *more)["variants"]
    assert "sliding window" in found["kara 50%"]["refused"]
    h2o = next(
        result for name, result in found.items() if name.startswith("h2o")
    )  # its sums leave room for fewer pairs
    assert h2o["share"] < 0.5 and "sliding window" in h2o["refused"]
    assert "kv_statistics" in found["triattention 50%"]["refused"]
    assert found["keydiff 50%"]["refused"] is None and "too short" in found["keydiff 10%"]["refused"]
    pairs = found["keydiff 50%"]["pieces"][0]["pairs"]
    assert found["keydiff 50%"]["pairs_share"] == pytest.approx((pairs + 32) / (LENGTH - 1 + 32))
    assert "kara 50%: refused, the model has layers with a sliding window" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--text", "TEXT", "--pieces", "9"], "--length=260 is not allowed: at most"),
        (["--text", "TEXT", "--methods", "karra"], "did you mean kara?"),
        (["--text", "TEXT", "--length", "9999"], "max_position_embeddings=512"),
        (["--text", "TEXT", "--memory", "0"], "--memory"),
        (["--text", "TEXT", "--kv-cache-dtypes", "int5"], "--kv-cache-dtypes"),
        (["--text", "TEXT", "TEXT"], "one file of each name"),
        (["--text", "TEXT", "--length", "60"], "--length"),
        (["--dataset", "TEXT"], "line 1 is no JSON object"),
        (["--dataset", "BYTES"], "bytes is no text in UTF-8"),
        (["--text", "EMPTY"], "--length=260 is not allowed: at most"),
        (["--text", "TEXT", "EMPTY", "--pieces", "2"], "--length=260 is not allowed: at most"),
    ],
)
def test_bad_input(options: list[str], message: str, checkpoint: Path, texts: list[str], tmp_path, capsys) -> None:
    files = {"TEXT": texts[0], "BYTES": str(tmp_path / "bytes"), "EMPTY": str(tmp_path / "empty")}
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").write_text("")
    given = [files.get(option, option) for option in options]
    with pytest.raises(SystemExit) as stopped:
        compare(checkpoint, tmp_path, *given)
    assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "compare.json").exists()


# Needles


def test_needles_are_found_by_a_model_that_says_them(texts: list[str], tokenizer: Any, tmp_path: Path) -> None:
    first, second = (tokenizer.encode(Path(path).read_text()) for path in texts)
    text = Text("text", first[:20], second[:200])
    needles = hide([text], 3, tokenizer, seed=4)
    for needle in needles:
        whole = tokenizer.decode(needle.haystack)
        assert whole.count(f"is {needle.number}.") == 1 and len(needle.haystack) + len(needle.question) < 220
        assert needle.is_found_in(f" {needle.number}.\n") and not needle.is_found_in(f" {needle.number}5")
        assert not needle.is_found_in(f" I say {needle.number}") and not needle.is_found_in("")
    places = [tokenizer.decode(needle.haystack).index("secret") for needle in needles]
    assert places == sorted(set(places))
    answers = {seed: one_answer(tokenizer, seed) for seed in range(30)}
    seed, answer = next((seed, tokens) for seed, tokens in answers.items() if len(set(tokens)) == len(tokens))
    chain = [*tokenizer.encode(" is"), *answer, *tokenizer.encode("!")]
    make_parrot(tmp_path, tokenizer.hf, tokenizer.hf.convert_ids_to_tokens(chain))
    options = ["--pieces", "1", "--memory", "0.5", "--methods", "random", "--needles", "1", "--seed", str(seed)]
    found = compare(tmp_path, tmp_path / "out", "--text", texts[0], *options)["variants"]
    for result in found.values():
        assert result["needles"] == {"number": 1, "found_in_output": 1, "found_in_prompt": 1, "found": [[True], [True]]}


def one_answer(tokenizer: Any, seed: int) -> list[int]:
    (needle,) = hide([Text("", [0], [0] * 200)], 1, tokenizer, seed)
    return tokenizer.encode(f" {needle.number}")


# Datasets, and going on


def test_a_dataset_is_answered_by_the_model(checkpoint: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"question": f"What is {i}?"}) for i in range(9)]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    options = ["--dataset", str(tmp_path / "asked.jsonl"), "--pieces", "3", "--memory", "0.5", "--methods", "random"]
    found = compare(checkpoint, tmp_path, *options, "--needles", "0")
    tokens = byte_level("plain")
    assert [tokens.decode(text["prompt"]) for text in found["texts"]] == [f"What is {i}?\n" for i in (0, 3, 6)]
    assert all(piece["kind"] == "asked" for piece in found["variants"]["all pairs"]["pieces"])
    assert 0.4 < found["variants"]["random 50%"]["pairs_share"] < 0.7


def test_lines_of_a_dataset_end_with_line_feeds_alone(tmp_path: Path) -> None:
    """JSON may have other separators of lines within its strings; blank lines and a byte order mark are left out."""
    path = tmp_path / "asked.jsonl"
    asked = ["a\u2028b", "c\u0085d"]
    lines = [json.dumps({"question": each}, ensure_ascii=False) for each in asked]
    path.write_bytes(f"\ufeff{lines[0]}\r\n\r\n{lines[1]}\n".encode())
    assert read_questions(path, 9) == asked


def test_a_folder_that_cannot_be_written_is_told_before_the_work(checkpoint: Path, texts, tmp_path, capsys) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(SystemExit) as stopped:
        compare(checkpoint, taken, "--text", texts[0], "--pieces", "1", "--memory", "0.5", "--methods", "random")
    printed = capsys.readouterr()
    assert stopped.value.code == 1 and f"error: {taken}: File exists" in printed.err
    assert "tokens/s" not in printed.out


def test_a_recommended_command_can_be_pasted() -> None:
    result = Result(name="all pairs", method=None, memory=1, share=1, kv_cache_dtype="auto")
    assert on_a_command_line(result, "my models/a") == "kvllm serve 'my models/a' --block-size 16"


def test_an_interrupted_comparison_goes_on(checkpoint: Path, texts, tmp_path: Path, monkeypatch, capsys) -> None:
    options = ["--text", *texts, "--pieces", "2", "--memory", "0.5", "--methods", "kara", "--needles", "1"]
    whole = compare(checkpoint, tmp_path / "whole", *options)
    measure, calls = measurement.Bench.measure, []

    def interrupted(self: Any, plan: Any, *args: Any, **more: Any) -> Any:
        calls.append(plan.variant.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(self, plan, *args, **more)

    monkeypatch.setattr(measurement.Bench, "measure", interrupted)
    with pytest.raises(SystemExit) as stopped:
        compare(checkpoint, tmp_path / "parts", *options)
    assert stopped.value.code == 130
    parts = compare(checkpoint, tmp_path / "parts", *options)
    assert calls == ["all pairs", "random 50%", "streaming 50%", "all pairs", "streaming 50%", "kara 50%"]
    for found in (whole, parts):
        found.pop("provenance")
        for result in found["variants"].values():
            result.pop("tokens_per_second")
    assert parts == whole
    capsys.readouterr()
    compare(checkpoint, tmp_path / "parts", *options)
    assert len(calls) == 6 and "4 variants of the same settings are there already" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        compare(checkpoint, tmp_path / "parts", *options, "--seed", "2")
    assert "--fresh" in capsys.readouterr().err


@pytest.mark.long
def test_windows_longer_than_the_texts_are_none(texts: list[str], tokenizer: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 300, "layer_types": ["sliding_attention"]}
    size = len(tokenizer.hf)
    make_checkpoint(tmp_path, "qwen3", vocab_size=size, head_dim=16, num_hidden_layers=1, **options)
    tokenizer.hf.save_pretrained(tmp_path)
    more = ["--pieces", "1", "--memory", "0.5", "--methods", "random", "--needles", "0"]
    found = compare(tmp_path, tmp_path / "out", "--text", texts[0], *more)["variants"]
    assert found["random 50%"]["pairs_share"] == pytest.approx(0.5, abs=BLOCK_SIZE / LENGTH)
