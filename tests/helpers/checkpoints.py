"""Tiny checkpoints with random weights, written by transformers."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerBase

from kvllm.calibration.dense import DenseModel
from kvllm.calibration.query_statistics import query_statistics
from kvllm.compression.gates import write_gates
from kvllm.compression.specs import SPECS
from kvllm.compression.statistics import write_statistics
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.models.config import load_model_config
from tests.helpers.gates import random_gates

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large, so that every weight matters in the logits
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_BOTH = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}


NEAR_ONE_OR_ZERO = (
    "norm.weight",
    "norm_1.weight",
    "norm_2.weight",
    "bias",
    "layer_scalar",
    "router.scale",
    "expert_scale",
)


def make_checkpoint(
    path: Path, family: str, *, seed: int = 0, sharded: bool = False, dtype: str = "float32", **options: Any
) -> torch.nn.Module:
    """Write a model of `family` ("llama", "mistral", "qwen2", "qwen3") to the directory `path` and return it.

    options: keys of the family's config beyond or instead of SIZES, such as `tie_word_embeddings`, `head_dim`.
    """
    torch.manual_seed(seed)
    options = {**SIZES, **options}
    kind = transformers.AutoModelForCausalLM
    if "vision_config" in options:  # the other options are of its text
        vision = options.pop("vision_config")
        options = {"text_config": options, "vision_config": vision, **{key: options[key] for key in OF_BOTH}}
        kind = transformers.AutoModelForImageTextToText
    config = transformers.AutoConfig.for_model(family, **options)
    model = kind.from_config(config, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        # transformers starts norms at one and biases at zero
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(NEAR_ONE_OR_ZERO):
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(path, max_shard_size="150KB" if sharded else "1GB")
    return model


def checkpoint_fixture(family: str, *, method_files: bool = False, **options: Any) -> Any:
    """A fixture: the directory of a checkpoint as `make_checkpoint` writes it, which tests leave as it is.

    method_files: with those of `add_method_files`.
    """

    @pytest.fixture(scope="session")
    def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp(family)
        make_checkpoint(path, family, **options)
        if method_files:
            add_method_files(path)
        return path

    return checkpoint


def add_method_files(path: Path) -> None:
    """Write beside a checkpoint what methods read: the statistics of its queries, as they are on two random texts, and
    gates with random weights."""
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randint(SIZES["vocab_size"], (60,), generator=generator).tolist() for _ in range(2)]
    write_statistics(path, query_statistics(DenseModel(path, 60), pieces), {})
    model = load_model_config(path)
    for seed, method in enumerate(name for name, spec in SPECS.items() if spec.gated):
        gates = random_gates(model.num_layers, model.num_kv_heads, model.head_dim, first=100 * seed)
        write_gates(path, method, gates, {})


def make_with_package_tokenizer(path: Path) -> None:
    """Write one layer with random weights, and the tokenizer of the package's model."""
    vocab_size = load_model_config(DEFAULT_MODEL).vocab_size
    make_checkpoint(path, "qwen3", head_dim=16, vocab_size=vocab_size, num_hidden_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEFAULT_MODEL / name, path)


def edit(path: Path, **changes: Any) -> None:
    """Change keys of config.json; `...` removes one."""
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    config = {key: value for key, value in config.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))


def make_parrot(path: Path, tokenizer: PreTrainedTokenizerBase, tokens: list[str]) -> None:
    """Write a model that says each of `tokens`, all different, after the one before it; and its tokenizer."""
    model = make_checkpoint(path, "qwen3", vocab_size=len(tokenizer), num_hidden_layers=1, head_dim=8)
    chain = tokenizer.convert_tokens_to_ids(tokens)
    state = model.state_dict()
    for name in ("model.embed_tokens", "lm_head", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"):
        state[f"{name}.weight"].zero_()
    for i, (token_id, following) in enumerate(pairwise(chain)):
        state["model.embed_tokens.weight"][token_id, i] = 1
        state["lm_head.weight"][following, i] = 1
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def make_draft(path: Path, model: torch.nn.Module, noise: float = 0.1) -> None:
    """Write beside a checkpoint one with some noise on its weights, which knows much of what that says."""
    torch.manual_seed(9)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * noise)
    model.save_pretrained(path / "draft")
