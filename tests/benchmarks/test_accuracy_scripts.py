"""The scripts about the survivors of a window and its attention."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.common import accuracy
from benchmarks.common.questions import QuestionSource
from benchmarks.paper import figure_7, figures_3_4_6
from benchmarks.reasoner.checkpoint import save_checkpoint
from benchmarks.reasoner.model import ROPE_THETA, Reasoner
from benchmarks.reasoner.tokenizer import TOKEN_IDS, encode
from kvllm import LLM, SamplingParams
from kvllm.errors import ConfigError
from tests.helpers.dense_decoder import DenseDecoder
from tests.helpers.literal_kara import literal_token2chunk
from tests.helpers.recorder import Recorder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reasoner with random weights that all matter in the logits."""
    torch.manual_seed(0)
    model = Reasoner(len(TOKEN_IDS))
    nn.init.normal_(model.embed_tokens.weight, std=0.3)
    for name, parameter in model.layers.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    path = tmp_path_factory.mktemp("random")
    save_checkpoint(model, path)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": ROPE_THETA}  # where the dense decoder looks
    (path / "config.json").write_text(json.dumps(config))
    return path


# The survivors of a window


def test_figure_7_shows_what_is_in_the_cache(checkpoint: Path, tmp_path: Path, capsys) -> None:
    settings = {"window": 48, "buffer": 8, "chunk_budget": 6, "max_chunk": 5}
    options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    arguments = ["--model", str(checkpoint), "--size", "5", "--retention", "0.4", "--event", "2", *options]
    figure_7.run_figure([*arguments, "--output", str(tmp_path)])
    written = json.loads((tmp_path / "figure_7.json").read_text())

    questions = QuestionSource(sizes=(5, 5), count=1).load()
    llm = LLM(checkpoint, max_model_len=512, block_size=1, compression=accuracy.kara("0.4", **settings))
    llm.llm_engine.executor = recorder = Recorder(llm.llm_engine.executor.runner, llm.config)
    params = SamplingParams(temperature=0, max_tokens=questions.max_tokens[0])
    (output,) = llm.generate(questions.prompts, params, use_tqdm=False)
    token_ids = output.prompt_token_ids + output.outputs[0].token_ids

    position, scored = written["position"], 40
    assert position == len(output.prompt_token_ids) + scored
    assert written["tokens"] == [llm.tokenizer.decode([i]) for i in token_ids[position : position + 48]]
    sets = {name: found["kept"] for name, found in written["sets"].items()}
    for layer, of_layer in enumerate(written["scores"]):
        for head, scores in enumerate(of_layer):
            row = np.array(scores, dtype=np.float32)
            kept = sets[figure_7.KEPT][layer][head]
            assert kept == literal_token2chunk(row, 16, 6, 5)
            assert sets[figure_7.CANDIDATES][layer][head] == literal_token2chunk(row, 10, 0, 5)
            assert sets[figure_7.PLAIN][layer][head] == literal_token2chunk(row, 16, 0, 5)
            cached = recorder.texts[0].cached[layer, head, position : position + scored]
            assert cached.nonzero().flatten().tolist() == kept
    for name, of_layers in sets.items():
        heads = [head for of_layer in of_layers for head in of_layer]
        expected = [sum(offset in head for head in heads) / 8 for offset in range(scored)]
        assert written["sets"][name]["shares"] == pytest.approx(expected)
    shown = capsys.readouterr().out
    assert all(name in shown for name in sets)
    assert (tmp_path / "figure_7.png").stat().st_size > 1000


# Causal and bidirectional attention


def test_figures_3_4_6_show_dense_attention(checkpoint: Path, tmp_path: Path, capsys) -> None:
    """One layer and KV head of two query heads, every probability written out."""
    arguments = ["--model", str(checkpoint), "--size", "4", "--window", "60", "--buffer", "20", "--retention", "0.25"]
    arguments += ["--layer", "2", "--head", "1", "--token", "11", "--output", str(tmp_path)]
    figures_3_4_6.run_figures(arguments)
    written = json.loads((tmp_path / "figures_3_4_6.json").read_text())
    problem = QuestionSource(sizes=(4, 4), count=1).load().problems[0]
    tokens, start, scored = encode(problem.prompt + problem.working), len(encode(problem.prompt)), 40
    assert written["start"] == start and len(written["tokens"]) == len(tokens)
    visible = torch.ones(4, 2, len(tokens), len(tokens), dtype=torch.bool).tril()
    text = DenseDecoder(checkpoint).forward(tokens, visible)
    queries, keys = text.queries[2][2:], text.keys[2][1]
    logits = (queries @ keys.T / 64**0.5)[..., start : start + scored]
    inside = logits[:, start : start + 60]
    causal = inside.masked_fill(torch.ones(60, scored).triu(1).bool(), -torch.inf).softmax(-1).mean(0)
    both = inside.softmax(-1).mean(0)
    for name, expected in (("causal", causal), ("bidirectional", both)):
        assert written["figure_3"][name] == pytest.approx(expected[:, 11].tolist(), abs=1e-5)

    later = (queries @ keys.T / 64**0.5).masked_fill(~visible[2, 1], -torch.inf).softmax(-1).mean(0)
    behind = later[start + 60 :, start : start + scored].sum(0)
    kept = {name: set(of_kind.sum(0).topk(10).indices.tolist()) for name, of_kind in (("c", causal), ("b", both))}
    layer = figures_3_4_6.Layer(*(part[2].float() for part in (text.queries, text.keys)), start, 60, 20)
    assert layer.behind[1].tolist() == pytest.approx(behind.tolist(), abs=1e-5)
    best = behind.topk(10).values.sum()
    one_head = figures_3_4_6.Layer(queries.float(), keys[None].float(), start, 60, 20).compare(0.25)
    assert one_head["in common"] == pytest.approx(len(kept["c"] & kept["b"]) / 10) and 0 < one_head["in common"] < 1
    for name, of_kind in (("causal", "c"), ("bidirectional", "b")):
        caught = behind[list(kept[of_kind])].sum() / best
        assert one_head[f"caught, {name}"] == pytest.approx(caught.item(), abs=1e-5)
    assert len(written["figure_6"]) == 4 and "caught, causal" in capsys.readouterr().out
    for figure in ("figure_3", "figure_4", "figure_6"):
        assert (tmp_path / f"{figure}.png").stat().st_size > 1000


def test_figure_7_in_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure_7, "WIDTH", 12)
    text = figure_7.render(["at", " we", "\n", "5", "."], {"kept": [0, 1, 0.5, 0.25, 1]})
    assert text.splitlines() == ["      at we¶", "kept  009994", "", "      5.", "kept  29"]


def test_stretches() -> None:
    assert [figure_7.runs_of(kept) for kept in ([], [4], [1, 2, 3], [1, 3, 4, 7])] == [0, 1, 1, 3]


@pytest.mark.parametrize(
    ("parse", "arguments", "message"),
    [
        (figure_7.parse_arguments, ["--retention", "2"], "--retention"),
    ],
)
def test_wrong_arguments(parse, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(arguments)


def test_figure_7_names_the_windows_there_are(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(checkpoint), "--size", "3", "--window", "48", "--buffer", "16", "--event", "9"]
    arguments += ["--output", str(tmp_path)]
    with pytest.raises(ConfigError, match="--event=9.*from 1 to"):
        figure_7.run_figure(arguments)
    with pytest.raises(ConfigError, match="retention below 1"):
        figure_7.run_figure([*arguments, "--retention", "1"])
