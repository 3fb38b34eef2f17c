"""The training of gates: biases against literal float64, a biased pass against dense attention, what is learned."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.reasoner.tasks import make_problem
from kvllm import LLM, ConfigError, SamplingParams
from kvllm.calibration.train_gates import (
    TEMPERATURE,
    Biased,
    Gating,
    Settings,
    TextPositions,
    Trainer,
    attend,
    decayed,
    dropped,
    tokens_of,
    train_gates,
)
from kvllm.comparison.texts import Text
from kvllm.compression.gates import Gates, gate_logits, gates_file
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.entrypoints import cli
from kvllm.tokenizer import load_tokenizer
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import paper_compression
from tests.helpers.dense_decoder import DenseDecoder
from tests.helpers.engines import random_token_ids

LENGTH, PROMPT, DELAY, TARGET = 40, 5, 6, 0.3
METHODS = ("dms", "trimkv")


checkpoint = checkpoint_fixture("qwen3", head_dim=16)


@pytest.fixture(scope="module")
def text() -> Text:
    token_ids = random_token_ids(LENGTH)[0]
    return Text("random", token_ids[:PROMPT], token_ids[PROMPT:])


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(1, 2, LENGTH, generator=torch.Generator().manual_seed(seed))


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def test_dropped_pairs_lose_their_attention_behind_the_delay(text: Text) -> None:
    logits, noise = logits_of(0), logits_of(1)
    found = dropped(logits, TextPositions(text), DELAY, TARGET, noise)
    bias = found.bias
    assert bias is not None and found.factor is None
    for head in range(2):
        keep = sigmoid((logits + noise)[0, head].double().numpy() / TEMPERATURE)
        for i in range(LENGTH):
            for j in range(i + 1):
                is_judged = j >= PROMPT and i - j > DELAY
                expected = np.log(keep[j]) if is_judged else 0
                assert bias[0, head, i, j].item() == pytest.approx(expected, abs=1e-4)
        assert found.kept[0, head].item() == pytest.approx(keep[PROMPT:].mean(), abs=1e-5)
        assert found.excess[0, head].item() == pytest.approx(max(0, keep[PROMPT:].mean() - TARGET), abs=1e-5)


def test_retention_falls_with_every_token(text: Text) -> None:
    logits = logits_of(2) + 3
    found = decayed(logits, TextPositions(text), DELAY, TARGET, torch.zeros(()))
    factor = found.factor
    assert factor is not None and found.bias is None
    for head in range(2):
        retention = sigmoid(logits[0, head].double().numpy())
        held, room, written = [], [], []
        for i in range(LENGTH):
            for j in range(i + 1):
                expected = retention[j] ** (i - j) if j >= PROMPT else 1
                assert factor[0, head, i, j].item() == pytest.approx(expected, abs=1e-5)
        for i in range(PROMPT, LENGTH, 16):
            held.append(sum(retention[j] ** (i - j) for j in range(PROMPT, i + 1)))
            written.append(i - PROMPT + 1)
            room.append(min(written[-1], DELAY) + TARGET * max(0, written[-1] - DELAY))
        assert found.kept[0, head].item() == pytest.approx(sum(held) / sum(written), abs=1e-5)
        excess = sum(max(0, h - r) for h, r in zip(held, room, strict=True)) / sum(written)
        assert excess > 0.05 and found.excess[0, head].item() == pytest.approx(excess, abs=1e-5)


def test_a_biased_pass_is_that_without_the_dropped_pairs(checkpoint: Path, text: Text) -> None:
    trainer, decoder, positions = (
        Trainer(checkpoint, Settings("dms", TARGET), LENGTH),
        DenseDecoder(checkpoint),
        TextPositions(text),
    )
    logits = [100 * logits_of(layer).sign() for layer in range(decoder.num_layers)]

    def bias(layer: int, *_: torch.Tensor) -> Biased:
        return dropped(logits[layer], positions, DELAY, TARGET, torch.zeros(()))

    visible = torch.ones(decoder.num_layers, 2, LENGTH, LENGTH, dtype=torch.bool).tril()
    for layer, of_layer in enumerate(logits):
        gone = (of_layer[0] < 0)[:, None] & (positions.distances > DELAY) & (torch.arange(LENGTH) >= PROMPT)
        visible[layer] &= ~gone
    ids = tokens_of(text)
    for gating, seen in ((Gating(bias), visible), (None, torch.ones_like(visible).tril())):
        found = trainer.model(ids, use_cache=False, change=gating).logits[0].double()
        torch.testing.assert_close(found, decoder.forward([*text.prompt, *text.output], seen).logits, rtol=0, atol=1e-3)


def test_a_factor_multiplies_the_logits_of_attention(checkpoint: Path) -> None:
    """Eight query heads, two KV heads."""
    generator = torch.Generator().manual_seed(3)
    queries, keys, values = (torch.randn(1, heads, LENGTH, 16, generator=generator) for heads in (8, 2, 2))
    factor = torch.rand(1, 2, LENGTH, LENGTH, generator=generator)
    module = Trainer(checkpoint, Settings("trimkv", TARGET), LENGTH).model.model.layers[1].self_attn
    gating = Gating(lambda *_: Biased(torch.zeros(1, 2), torch.zeros(1, 2), factor=factor))
    mask = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)[None, None]
    found, _ = attend(module, queries, keys, values, mask, change=gating, scaling=0.5)
    for head in range(8):
        query, key, value = (
            x[0].double().numpy() for x in (queries[:, head], keys[:, head // 4], values[:, head // 4])
        )
        for i in range(LENGTH):
            weights = np.exp(factor[0, head // 4, i, : i + 1].double().numpy() * (key[: i + 1] @ query[i]) * 0.5)
            expected = weights @ value[: i + 1] / weights.sum()
            np.testing.assert_allclose(found[0, i, head].double().numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name == "dms" else pytest.mark.long) for name in METHODS]
)
def test_gates_learn_which_pairs_may_go(method: str) -> None:
    """Of a program of four lines: what is kept falls towards the target, and DMS predicts better than with as many KV
    pairs by lot."""
    encode, problem = load_tokenizer(DEFAULT_MODEL).encode, make_problem(random.Random(0), 4)
    text = Text("problem", encode(problem.prompt), encode(problem.working))
    settings = Settings(method, TARGET, 16, steps=40, learning_rate=0.03)
    trainer = Trainer(Path(DEFAULT_MODEL), settings, text.stored + 1)
    before, steps = trainer.loss(text, TARGET)[1], [*trainer.train([text])]
    assert len(steps) == 40 and steps[0].target == 1 and steps[-1].target == TARGET
    found = [trainer.loss(text, TARGET)[1] for _ in range(4)]
    kept, divergence = mean(step.kept for step in found), mean(step.divergence for step in found)
    assert before.kept > 0.95 and mean(step.loss for step in found) < 0.7 * before.loss
    if method == "dms":
        assert kept < TARGET + 0.2
        trainer.gates = same_for_all(trainer.gates, kept)
        by_lot = [trainer.loss(text, TARGET)[1] for _ in range(4)]
        assert mean(step.kept for step in by_lot) == pytest.approx(kept, abs=0.1)
        assert divergence < 0.8 * mean(step.divergence for step in by_lot)


def same_for_all(gates: Gates, kept: float) -> Gates:
    """Gates that keep every KV pair with the probability `kept`."""
    constant = torch.full_like(gates.output_bias, kept).logit()
    return Gates(gates.hidden, gates.hidden_bias, torch.zeros_like(gates.output), constant)


def test_written_gates_say_of_cached_pairs_what_the_trained_ones_say(checkpoint: Path, text: Text) -> None:
    trainer = Trainer(checkpoint, Settings("dms", TARGET, DELAY, steps=5), LENGTH)
    for _ in trainer.train([text]):
        pass
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 2, LENGTH, 16, generator=generator) for _ in range(2))
    for layer in range(3):
        found = gate_logits(trainer.trained().of_layers([layer]), keys, values, [LENGTH - 1], trainer.frequencies)
        torch.testing.assert_close(found, trainer.logits(layer, keys, values), rtol=1e-3, atol=1e-3)


# The command


@pytest.mark.parametrize("method", METHODS)
def test_the_command_writes_beside_the_checkpoint(tmp_path: Path, method: str, capsys: pytest.CaptureFixture) -> None:
    for file in Path(DEFAULT_MODEL).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "text").write_text(make_problem(random.Random(0), 6).working)
    options = ["calibrate", str(tmp_path), "--gates", method, "--text", str(tmp_path / "text")]
    options += ["--pieces", "2", "--length", "40", "--steps", "3"]
    cli.main(options)
    out = capsys.readouterr().out
    assert "step 3: loss" in out and f"Written: {tmp_path / gates_file(method)}, from 80 tokens" in out
    compression = paper_compression(method=method, period=8, window_blocks=3, buffer=4)
    llm = LLM(tmp_path, block_size=16, num_gpu_blocks_override=40, compression=compression)
    llm.generate("a", SamplingParams(max_tokens=120, ignore_eos=True), use_tqdm=False)
    assert llm.stats().windows_compressed > 0
    for wrong, message in (
        (["--retention", "1"], "--retention=1.0 is not allowed: between 0 and 1"),
        (["--delay", "0"], "--delay=0 is not allowed: at least 1"),
        (["--length", "4"], "--length=4 is not allowed: more than 4"),
        (["--layer-losses"], "not allowed with argument"),
    ):
        with pytest.raises(SystemExit):
            cli.main([*options, *wrong])
        assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_known_before_the_work(text: Text) -> None:
    with pytest.raises(ConfigError, match="--model='/proc'.* a folder in which a file can be written"):
        train_gates(Path("/proc"), [text], "random", Settings("dms", TARGET))
