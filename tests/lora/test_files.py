"""What an adapter's files must be, and what is said of those that are not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvllm import ConfigError, RequestError
from kvllm.lora.files import Adapters, read_pairs
from kvllm.lora.request import LoRARequest
from kvllm.models.config import load_model_config
from kvllm.worker.adapter_weights import adaptable_shapes
from tests.helpers.adapters import copied, make_adapter
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.families import FAMILIES

checkpoint = checkpoint_fixture(**FAMILIES["llama-tied"])


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), checkpoint, rank=8)


@pytest.fixture(scope="module")
def adapters(checkpoint: Path) -> Adapters:
    return Adapters(adaptable_shapes(load_model_config(checkpoint)), max_rank=8)


def test_the_matrices_of_a_model(checkpoint: Path) -> None:
    shapes = adaptable_shapes(load_model_config(checkpoint))
    assert len(shapes) == 3 * 7
    assert shapes["model.layers.2.mlp.down_proj"] == (64, 96)
    assert shapes["model.layers.0.self_attn.k_proj"] == (16, 64)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_names_of_a_multimodal_model(adapter: Path, adapters: Adapters, tmp_path: Path, prefix: str) -> None:
    """PEFT names modules as the model that was trained has them."""
    other = copied(adapter, tmp_path / "other", {"base_model.model.model.": f"base_model.model.{prefix}"})
    pairs = read_pairs(other)
    assert pairs.keys() == read_pairs(adapter).keys() and all(prefix in pair.a for pair in pairs.values())
    adapters.open(LoRARequest("images", 1, str(other)))


def test_equal_files_are_one_adapter(adapter: Path, adapters: Adapters, tmp_path: Path) -> None:
    opened = adapters.open(LoRARequest("a", 1, str(adapter)))
    assert (opened.name, opened.path) == ("a", str(adapter))
    same = shutil.copytree(adapter, tmp_path / "same")
    assert adapters.open(LoRARequest("b", 2, str(same))).digest == opened.digest
    other = copied(adapter, tmp_path / "other", lora_alpha=9)
    assert adapters.open(LoRARequest("c", 3, str(other))).digest != opened.digest


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora=true: magnitudes"),
    "modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: whole modules"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4': it needs the changed"),
    "bias": ({"bias": "all"}, "bias='all': trained biases"),
    "type": ({"peft_type": "IA3"}, "peft_type='IA3': only LORA"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
    "rank": ({"r": 7}, r"lora_A \[8, 96\] and lora_B .*says rank 7"),
    "no rank": ({"r": 0}, "ranks are at least 1"),
    "pattern": ({"rank_pattern": {"(": 3}}, "is no configuration of an adapter"),
    "text": ({"r": "eight"}, r"is no configuration of an adapter: Expected `int`, got `str`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configurations(adapter: Path, adapters: Adapters, tmp_path: Path, name: str) -> None:
    config, message = REFUSED[name]
    path = copied(adapter, tmp_path / "copy", **config)
    with pytest.raises(RequestError, match=message):
        adapters.open(LoRARequest("x", 1, str(path)))


RENAMED = {
    "embeddings": ({"layers.0.self_attn.q_proj.lora_A.weight": "embed_tokens.lora_embedding_A"}, "only lora_A and"),
    "head": ({"model.layers.0.self_attn.q_proj": "lm_head"}, "adapts lm_head, which this model does not have or"),
    "layer": ({"layers.0.mlp.up": "layers.3.mlp.up"}, r"adapts model\.layers\.3\.mlp\.up_proj"),
    "half": ({"layers.0.mlp.up_proj.lora_A": "layers.7.mlp.up_proj.lora_A"}, "lacks lora_A or lora_B of"),
    "magnitudes": ({"layers.0.mlp.up_proj.lora_A.weight": "layers.0.mlp.up_proj.lora_magnitude_vector"}, "magnitude"),
}


@pytest.mark.parametrize("name", RENAMED)
def test_tensors(adapter: Path, adapters: Adapters, tmp_path: Path, name: str) -> None:
    renamed, message = RENAMED[name]
    path = copied(adapter, tmp_path / "copy", renamed)
    with pytest.raises(RequestError, match=message):
        adapters.open(LoRARequest("x", 1, str(path)))


def test_shapes_and_ranks(checkpoint: Path, adapter: Path, adapters: Adapters, tmp_path: Path) -> None:
    larger = make_adapter(tmp_path / "larger", checkpoint, rank=9)
    with pytest.raises(RequestError, match="has rank 9: max_lora_rank=8 allows less, raise it"):
        adapters.open(LoRARequest("x", 1, str(larger)))
    path = copied(adapter, tmp_path / "wide")
    tensors = load_file(path / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"] = torch.zeros(8, 65)
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(RequestError, match=r"matrix is \[96, 64\]: it is an adapter of another model"):
        adapters.open(LoRARequest("x", 1, str(path)))


def test_missing_and_damaged_files(adapter: Path, adapters: Adapters, tmp_path: Path) -> None:
    path = copied(adapter, tmp_path / "copy")
    weights, request = path / "adapter_model.safetensors", LoRARequest("x", 1, str(path))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(RequestError, match="it is damaged or incomplete"):
        adapters.open(request)
    weights.rename(path / "adapter_model.bin")
    with pytest.raises(RequestError, match="it is never loaded from pickle"):
        adapters.open(request)
    (path / "adapter_config.json").write_text("{")
    with pytest.raises(RequestError, match="is no configuration of an adapter"):
        adapters.open(request)
    (path / "adapter_config.json").unlink()
    with pytest.raises(RequestError, match=r"has no adapter_config\.json: give the directory"):
        adapters.open(request)


@pytest.mark.parametrize("given", [("", 1, "x"), ("x", 0, "x"), ("x", 1, "")])
def test_requests(given: tuple[str, int, str]) -> None:
    with pytest.raises(ConfigError, match="is not allowed"):
        LoRARequest(*given)
