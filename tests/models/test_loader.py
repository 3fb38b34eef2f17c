"""The loader against damaged and hostile checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvllm.errors import CheckpointError, ConfigError
from kvllm.models.config import load_model_config
from kvllm.models.loader import load_model
from kvllm.models.multimodal import text_tensors
from kvllm.parallel import SingleRank
from tests.helpers.checkpoints import edit, make_checkpoint
from tests.helpers.families import FAMILIES
from tests.helpers.paged_model import CPU, PagedModel, load, tokens
from tests.helpers.processes import run_python

STATUS = Path("/proc/self/status")


def copy_checkpoint(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy whose tensors were changed in place by `change`."""
    shutil.copy(source / "config.json", target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_tensors_that_do_not_fit(tmp_path: Path, qwen3: Path) -> None:
    up, norm = ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight")

    def change(path: Path, message: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        with pytest.raises(CheckpointError, match=message):
            load(copy_checkpoint(qwen3, path, change))

    change(tmp_path, f"lacks {up}$", lambda tensors: tensors.pop(up))
    change(tmp_path, "has unknown model.extra$", lambda tensors: tensors.update({"model.extra": torch.ones(1)}))
    shape = rf"{up} has shape \(95, 64\), but config.json implies \(96, 64\)"
    change(tmp_path, shape, lambda tensors: tensors.update({up: torch.ones(95, 64)}))
    quantized = f"{norm} has dtype I8; kvllm reads BF16, F16, F32, F64"
    change(tmp_path, quantized, lambda tensors: tensors.update({norm: torch.ones(16, dtype=torch.int8)}))
    many = "lacks model.layers.0.input_layernorm.weight, .* and 28 more"
    change(tmp_path, many, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])


def test_tensors_that_are_not_needed_are_ignored(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    embedding = make_checkpoint(source, "llama", tie_word_embeddings=True).model.embed_tokens.weight.detach()
    target.mkdir()
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": embedding.clone()}
    copy_checkpoint(source, target, lambda tensors: tensors.update(buffers))
    token_ids = tokens(10)
    expected, found = (PagedModel(*load(path)).logits({0: token_ids}) for path in (source, target))
    assert torch.equal(expected, found)


def test_a_head_of_its_own_where_embeddings_are_tied(tmp_path: Path) -> None:
    """transformers computes with the head that the file has, whatever config.json says."""
    make_checkpoint(tmp_path, "llama")
    edit(tmp_path, tie_word_embeddings=True)
    with pytest.raises(
        CheckpointError, match="differs from model.embed_tokens.weight, .* tie_word_embeddings to false"
    ):
        load(tmp_path)
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([tokens(10)])).logits[0]
    edit(tmp_path, tie_word_embeddings=False)
    torch.testing.assert_close(PagedModel(*load(tmp_path)).logits({0: tokens(10)}), expected, atol=1e-4, rtol=1e-4)


def test_sizes_are_compared_before_the_model_is_allocated(tmp_path: Path) -> None:
    """The sizes imply four tebibytes of embeddings."""
    make_checkpoint(tmp_path, "qwen3", head_dim=16)
    edit(tmp_path, hidden_size=1 << 18, vocab_size=1 << 22)
    with pytest.raises(CheckpointError, match=r"has shape \(.*64\), but config.json implies \(4194304, 262144\)"):
        load(tmp_path)


@pytest.mark.parametrize("form", ["../other/{}", "{absolute}", "inside/../../other/{}", "../other/../other/{}"])
def test_an_index_that_names_files_outside_of_the_folder(tmp_path: Path, form: str) -> None:
    path, other = tmp_path / "checkpoint", tmp_path / "other"
    make_checkpoint(path, "llama", sharded=True)
    other.mkdir()
    (path / "inside").mkdir()
    shard = sorted(path.glob("model-*.safetensors"))[0]
    shard.rename(other / shard.name)
    rename_in_index(path, shard.name, form.format(shard.name, absolute=other / shard.name))
    with pytest.raises(CheckpointError, match="names files outside of the checkpoint's folder, .*safetensors: use"):
        load(path)


def test_the_files_of_a_checkpoint_may_be_links(tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub, where all files of a snapshot are links to blobs outside of it."""
    source, blobs, snapshot = (tmp_path / name for name in ("source", "blobs", "snapshots/main"))
    make_checkpoint(source, "llama", sharded=True)
    expected = PagedModel(*load(source)).logits({0: tokens(10)})
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(source.iterdir())):
        file.rename(blobs / f"{number:x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:x}")
    assert torch.equal(PagedModel(*load(snapshot)).logits({0: tokens(10)}), expected)


def test_an_index_may_name_files_of_a_folder_inside(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", sharded=True)
    expected = PagedModel(*load(tmp_path)).logits({0: tokens(10)})
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    (tmp_path / "inside").mkdir()
    shard.rename(tmp_path / "inside" / shard.name)
    rename_in_index(tmp_path, shard.name, f"inside/{shard.name}")
    assert torch.equal(PagedModel(*load(tmp_path)).logits({0: tokens(10)}), expected)


def rename_in_index(path: Path, old: str, new: str) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = {key: new if name == old else name for key, name in index["weight_map"].items()}
    file.write_text(json.dumps(index))


def test_unreadable_weights(tmp_path: Path, qwen3: Path) -> None:
    shutil.copy(qwen3 / "config.json", tmp_path)
    with pytest.raises(
        CheckpointError, match="no weights: neither model.safetensors nor .*index.json nor model-00001-of"
    ):
        load(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin only. kvllm never loads weights from pickle"):
        load(tmp_path)
    content = (qwen3 / "model.safetensors").read_bytes()
    for damaged in (content[:-100], content[:50], b""):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read .* download it again"):
            load(tmp_path)


def test_incomplete_shards(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", sharded=True)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    last = shards[-1].read_bytes()
    shards[-1].write_bytes(last[:-1])
    with pytest.raises(CheckpointError, match=f"{shards[-1].name} cannot be read"):
        load(tmp_path)
    shards[-1].unlink()
    with pytest.raises(CheckpointError, match=f"names files that are absent, {shards[-1].name}"):
        load(tmp_path)
    for content in ("{}", '{"weight_map": 5}', "[" * 100_000, '{"weight_map": {"a": 1e999}}'):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match="not an index of safetensors files"):
            load(tmp_path)
    for name in ("", ".", "a\0b", "a" * 5000):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
        with pytest.raises(CheckpointError, match="names files that are absent"):
            load(tmp_path)


def renumber(path: Path, total: int) -> list[Path]:
    """Remove the index, and name the shards as if there were `total` of them."""
    (path / "model.safetensors.index.json").unlink()
    shards = sorted(path.glob("model-*.safetensors"))
    return [
        shard.rename(path / f"model-{number:05}-of-{total:05}.safetensors") for number, shard in enumerate(shards, 1)
    ]


def test_shards_without_an_index(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", sharded=True)
    expected = PagedModel(*load(tmp_path)).logits({0: tokens(10)})
    count = len(list(tmp_path.glob("model-*.safetensors")))
    shards = renumber(tmp_path, count)
    for stray in ("adapter_model", "consolidated", "consolidated-00001-of-00002", "kv_statistics", "model-1-of-9"):
        save_file({"stray": torch.ones(1)}, tmp_path / f"{stray}.safetensors")
    assert torch.equal(PagedModel(*load(tmp_path)).logits({0: tokens(10)}), expected)
    (tmp_path / "second").mkdir()
    shards[1].rename(tmp_path / "second" / shards[1].name)
    with pytest.raises(CheckpointError, match=f"shards of the weights are absent, {shards[1].name}: download them"):
        load(tmp_path)
    save_file({"stray": torch.ones(1)}, tmp_path / "model-00001-of-00009.safetensors")
    with pytest.raises(CheckpointError, match="shards of several checkpoints, model-00001-of-.* remove those of the"):
        load(tmp_path)


def test_a_last_shard_that_is_absent_and_no_index(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", sharded=True)
    count = len(list(tmp_path.glob("model-*.safetensors")))
    renumber(tmp_path, count + 1)
    with pytest.raises(CheckpointError, match=f"are absent, model-{count + 1:05}-of-{count + 1:05}.safetensors: down"):
        load(tmp_path)


def test_a_single_shard(tmp_path: Path, qwen3: Path) -> None:
    shutil.copy(qwen3 / "config.json", tmp_path)
    shutil.copy(qwen3 / "model.safetensors", tmp_path / "model-00001-of-00001.safetensors")
    expected, found = (PagedModel(*load(path)).logits({0: tokens(10)}) for path in (qwen3, tmp_path))
    assert torch.equal(expected, found)


FORMS = {
    "gemma3-images": (("language_model.model.", "language_model.lm_head."), "vision_tower."),
    "mistral3-images": (("model.language_model.", "lm_head."), "model.multi_modal_projector."),
    "qwen25-vl": (("model.", "lm_head."), "visual."),
    "qwen3-vl": (("language_model.", "lm_head."), "model.visual."),
}


@pytest.mark.parametrize("family", FORMS)
def test_tensors_of_multimodal_checkpoints(tmp_path: Path, family: str) -> None:
    """Under the names that files have had: those of the text are found, and those for images are not read."""
    (model, head), images = FORMS[family]
    make_checkpoint(tmp_path / "source", **FAMILIES[family])
    expected = PagedModel(*load(tmp_path / "source")).logits({0: tokens(10)})

    def change(tensors: dict[str, torch.Tensor]) -> None:
        text = text_tensors(tensors)
        tensors.clear()
        for name, tensor in text.items():
            new = head + name.removeprefix("lm_head.") if name.startswith("lm_head") else model + name[6:]
            tensors[new] = tensor
        tensors[f"{images}weight"] = torch.ones(3)

    (tmp_path / "target").mkdir()
    copy_checkpoint(tmp_path / "source", tmp_path / "target", change)
    assert torch.equal(PagedModel(*load(tmp_path / "target")).logits({0: tokens(10)}), expected)
    (tmp_path / "other").mkdir()
    copy_checkpoint(tmp_path / "target", tmp_path / "other", lambda t: t.update({"sound_tower.weight": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"it has unknown sound_tower.weight$"):
        load(tmp_path / "other")


def test_layers_that_predict_later_tokens_are_not_loaded(tmp_path: Path) -> None:
    """Those of a family that has some; of others, they are unknown."""
    make_checkpoint(tmp_path / "source", **FAMILIES["glm4-moe"])
    later = {"model.layers.3.eh_proj.weight": torch.ones(64, 128), "model.layers.3.mlp.gate.weight": torch.ones(8, 64)}
    (tmp_path / "target").mkdir()
    copy_checkpoint(tmp_path / "source", tmp_path / "target", lambda tensors: tensors.update(later))
    expected, found = (PagedModel(*load(tmp_path / name)).logits({0: tokens(10)}) for name in ("source", "target"))
    assert torch.equal(expected, found)


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_of_the_model_without_its_head(tmp_path: Path, sharded: bool) -> None:
    """As the base class saves them, `layers.0...` in place of `model.layers.0...`: the head is tied or is needed."""
    model = make_checkpoint(tmp_path / "whole", "qwen3", head_dim=16, tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path / "base", max_shard_size="150KB" if sharded else "1GB")
    assert "Qwen3Model" in (tmp_path / "base" / "config.json").read_text()
    expected, found = (PagedModel(*load(tmp_path / name)).logits({0: tokens(10)}) for name in ("whole", "base"))
    assert torch.equal(expected, found)
    edit(tmp_path / "base", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="it lacks lm_head.weight$"):
        load(tmp_path / "base")


def test_tensors_without_a_prefix_beside_a_head(tmp_path: Path, qwen3: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    copy_checkpoint(qwen3, tmp_path, change)
    expected, found = (PagedModel(*load(path)).logits({0: tokens(10)}) for path in (qwen3, tmp_path))
    assert torch.equal(expected, found)


def test_float16_on_the_cpu_is_refused(qwen3: Path) -> None:
    with pytest.raises(ConfigError, match="float16 .* use bfloat16 or float32"):
        load(qwen3, torch.float16)


def memory(name: str) -> int:
    """A line of /proc/self/status in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def measure_loading(path: str, bits: int | None) -> None:
    """Print by how much the memory of the process grows at most, and the bytes of the weights that it keeps."""
    config = load_model_config(Path(path))
    file_bytes = (Path(path) / "model.safetensors").stat().st_size
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before = memory("VmRSS")
    model = load_model(Path(path), config, SingleRank(), torch.bfloat16, CPU, 64, bits)
    peak = memory("VmHWM") - before
    packed = model.lm_head.weight.packed
    assert packed is not None and packed.dtype == (torch.int8 if bits else torch.bfloat16)
    embedding_bytes = 2 * config.vocab_size * config.hidden_size  # its own rows are not packed
    print(json.dumps([peak, (file_bytes - embedding_bytes) // 2 + embedding_bytes if bits else file_bytes]))


@pytest.mark.skipif(not STATUS.exists(), reason="this system does not tell a process how much memory it had")
@pytest.mark.parametrize("bits", [pytest.param(None, marks=pytest.mark.long), 8])
def test_no_second_copy_of_the_weights_is_held(tmp_path: Path, bits: int | None) -> None:
    """Pages of the file count as memory of the process, too, and how many there are at once varies beside other work:
    the least of three new processes counts, of which each would hold a second copy."""
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "vocab_size": 16384, "num_hidden_layers": 1}
    make_checkpoint(tmp_path, "qwen3", **sizes, dtype="bfloat16")
    peak, kept = min(run_python(f"measure_loading({str(tmp_path)!r}, {bits})", __name__) for _ in range(3))
    assert 0.5 * kept < peak < kept + 40e6 < 1.5 * (tmp_path / "model.safetensors").stat().st_size
