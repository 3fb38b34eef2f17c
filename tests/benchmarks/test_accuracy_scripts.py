"""The scripts about the survivors of a window and its attention."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.paper import figure_7, figures_3_4_6, settings
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


def test_figure_7_shows_what_is_in_the_cache(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--window", "48", "--buffer", "8"]
    arguments = ["--model", str(checkpoint), "--size", "5", "--retention", "0.4", "--event", "2", *options]
    figure_7.run_figure([*arguments, "--output", str(tmp_path)])
    written = json.loads((tmp_path / "figure_7.json").read_text())

    (problem,) = settings.make_problems(1, (5, 5), seed=1)
    compression = settings.kara("0.4", window=48, buffer=8)
    llm = LLM(checkpoint, max_model_len=512, block_size=1, compression=compression)
    llm.llm_engine.executor = recorder = Recorder(llm.llm_engine.executor.runner, llm.config)
    params = SamplingParams(temperature=0, max_tokens=len(encode(problem.working)) + 16)
    (output,) = llm.generate([problem.prompt], params, use_tqdm=False)
    token_ids = output.prompt_token_ids + output.outputs[0].token_ids

    position, scored = written["position"], 40
    assert position == len(output.prompt_token_ids) + scored
    assert written["tokens"] == [llm.tokenizer.decode([i]) for i in token_ids[position : position + 48]]
    sets = written["sets"]
    for layer, of_layer in enumerate(written["scores"]):
        for head, scores in enumerate(of_layer):
            row = np.array(scores, dtype=np.float32)
            kept = sets[figure_7.KEPT][layer][head]
            assert kept == literal_token2chunk(row, 16, 8, 8)
            assert sets[figure_7.CANDIDATES][layer][head] == literal_token2chunk(row, 8, 0, 8)
            assert sets[figure_7.PLAIN][layer][head] == literal_token2chunk(row, 16, 0, 8)
            cached = recorder.texts[0].cached[layer, head, position : position + scored]
            assert cached.nonzero().flatten().tolist() == kept
    assert (tmp_path / "figure_7.png").stat().st_size > 1000


# Causal and bidirectional attention


def test_figures_3_4_6_show_dense_attention(checkpoint: Path, tmp_path: Path, capsys) -> None:
    """The last layer, every probability written out."""
    arguments = ["--model", str(checkpoint), "--size", "4", "--window", "60", "--buffer", "20", "--retention", "0.25"]
    figures_3_4_6.run_figures([*arguments, "--output", str(tmp_path)])
    written = json.loads((tmp_path / "figures_3_4_6.json").read_text())
    (problem,) = settings.make_problems(1, (4, 4), seed=1)
    tokens, start, scored = encode(problem.prompt + problem.working), len(encode(problem.prompt)), 40
    assert written["start"] == start
    visible = torch.ones(4, 2, len(tokens), len(tokens), dtype=torch.bool).tril()
    text = DenseDecoder(checkpoint).forward(tokens, visible)
    logits = torch.einsum("hgqd,hkd->hgqk", text.queries[3].unflatten(0, (2, 2)), text.keys[3]) / 64**0.5
    inside = logits[:, :, start : start + 60, start : start + scored]
    causal = inside.masked_fill(torch.ones(60, scored).triu(1).bool(), -torch.inf).softmax(-1).mean(1)
    both = inside.softmax(-1).mean(1)
    head, token = written["head"], written["token"]
    assert head == causal.amax(-1).mean(-1).argmax() and token < scored
    for name, expected in (("causal", causal), ("bidirectional", both)):
        assert written["figure_3"][name] == pytest.approx(expected[head, :, token].tolist(), abs=1e-5)

    later = logits.masked_fill(~visible[3, 0], -torch.inf).softmax(-1).mean(1)
    behind = later[:, start + 60 :, start : start + scored].sum(1)
    best = behind.topk(10).values.sum(-1)
    chosen = {name: of_kind.sum(1).topk(10).indices for name, of_kind in (("causal", causal), ("bidirectional", both))}
    last = written["figure_6"][3]
    for name, indices in chosen.items():
        assert last[f"caught, {name}"] == pytest.approx((behind.gather(1, indices).sum(1) / best).mean(), abs=1e-5)
    common = [len(set(a) & set(b)) for a, b in zip(*(indices.tolist() for indices in chosen.values()), strict=True)]
    assert last["in common"] == pytest.approx(sum(common) / 20) and 0 < last["in common"] < 1
    assert len(written["figure_6"]) == 4 and "caught, causal" in capsys.readouterr().out
    for figure in ("figure_3", "figure_4", "figure_6"):
        assert (tmp_path / f"{figure}.png").stat().st_size > 1000


def test_figure_7_names_the_windows_there_are(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(checkpoint), "--size", "3", "--window", "48", "--buffer", "16", "--event", "9"]
    arguments += ["--output", str(tmp_path)]
    with pytest.raises(ConfigError, match="--event=9.*from 1 to"):
        figure_7.run_figure(arguments)
    with pytest.raises(ConfigError, match="retention below 1"):
        figure_7.run_figure([*arguments, "--retention", "1"])
