"""The layer that a checkpoint has for drafts: whatever happened to a sequence, these are what transformers' module says
of the same hidden states, and tokens are those without it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.core.drafting.step_cost import StepCost
from kvllm.errors import CheckpointError, ConfigError
from kvllm.sampling_params import StructuredOutputsParams
from kvllm.worker import graph_sizes
from kvllm.worker.drafter import Text
from kvllm.worker.features.drafts import Drafts
from kvllm.worker.mtp_model import MTPModel
from kvllm.worker.step_batch import StepBatch
from tests.helpers.checkpoints import edit, make_checkpoint
from tests.helpers.engines import greedy, make_llm, random_prompts, records_chunks, tokens
from tests.helpers.families import FAMILIES
from tests.helpers.gguf_files import write_gguf

COUNT = 3
LAYERS = 2
KINDS = {"layer_types": ["linear_attention", "full_attention"]}
NAMES: dict[str, dict[str, Any]] = {
    "glm4-moe": {},
    "glm4-moe-lite": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek-v3": {},
    "qwen3.5": KINDS,
    "qwen3-next": KINDS,
}
"""Families, with what config.json says of their layers but the one for drafts."""
OF_QWEN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
    "eh_proj": "fc",
}


def make_with_mtp(path: Path, name: str, **options: Any) -> Path:
    """Of `LAYERS` layers and one more, which often says what they say: none adds much to its input, and the one more
    gets the token's own embedding with some noise."""
    kinds = {key: [*of_layers, of_layers[-1]] for key, of_layers in NAMES[name].items()}
    model = make_checkpoint(path, **{**FAMILIES[name], **kinds, **options, "num_hidden_layers": LAYERS + 1})
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "down_proj" in key or "o_proj" in key:
                weight.mul_(0.2)
            if "embed_tokens" in key:
                weight.mul_(5)
    model.save_pretrained(path)
    size, is_qwen = model.config.hidden_size, "qwen" in name
    layer, found = f"model.layers.{LAYERS}", load_file(path / "model.safetensors")
    joined = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    more = {key: torch.randn(size) * 0.1 + (not is_qwen) for key in ("enorm", "hnorm")}
    more["shared_head.norm"] = found["model.norm.weight"] + torch.randn(size) * 0.1
    more["eh_proj"] = joined + torch.randn_like(joined) * 0.05
    if is_qwen:
        found = {key.replace(layer, "mtp.layers.0"): tensor for key, tensor in found.items()}
        found |= {f"mtp.{OF_QWEN[key]}.weight": tensor for key, tensor in more.items()}
    else:
        more |= {"embed_tokens": found["model.embed_tokens.weight"], "shared_head.head": found["lm_head.weight"]}
        found |= {f"{layer}.{key}.weight": tensor.clone() for key, tensor in more.items()}
    save_file(found, path / "model.safetensors", {"format": "pt"})
    edit(path, num_hidden_layers=LAYERS, **({} if is_qwen else {"num_nextn_predict_layers": 1}), **NAMES[name])
    return path


def write_with_mtp(file: Path, name: str) -> Path:
    """A file of the checkpoint of `make_with_mtp`, whose layer for drafts is the last one there."""
    path = make_with_mtp(file.parent / "transformers", name)
    layer, is_qwen = f"model.layers.{LAYERS}.", "qwen" in name
    tensors = {key.replace("mtp.layers.0.", layer): each for key, each in load_file(path / "model.safetensors").items()}
    parts = OF_QWEN if is_qwen else dict(zip(OF_QWEN, OF_QWEN, strict=True))
    own = {there: tensors.pop(f"{'mtp.' if is_qwen else layer}{here}.weight") for there, here in parts.items()}
    for copy in ("embed_tokens", "shared_head.head"):
        tensors.pop(f"{layer}{copy}.weight", None)
    kinds = {key: [*of_layers, of_layers[-1]] for key, of_layers in NAMES[name].items()}
    whole = shutil.copytree(path, file.parent / "whole")
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    edit(whole, num_hidden_layers=LAYERS + 1, **kinds)
    model = transformers.AutoModelForCausalLM.from_pretrained(whole)

    def add(writer: GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        for part, tensor in own.items():
            added = is_qwen and part.endswith("norm")  # as to all of its norms
            writer.add_tensor(f"blk.{LAYERS}.nextn.{part.replace('.', '_')}.weight", (tensor + added).numpy())

    write_gguf(file, model, change=add)
    return file


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_with_mtp(tmp_path_factory.mktemp("glm4-moe"), "glm4-moe")


class Recorder:
    """An engine that tries all drafts. found: each text with the hidden states that its draft follows from, of the
    tokens but the last; the position of the first of them; and the draft."""

    def __init__(self, path: Path, **options: Any) -> None:
        config = {"method": "mtp", "num_speculative_tokens": COUNT}
        self.llm = make_llm(path, speculative_config=config, **options)
        self.llm.llm_engine.scheduler.speculation.cost = None
        self.found: list[tuple[list[int], torch.Tensor, int, list[int]]] = []
        (drafts,) = (each for each in self.llm.llm_engine.executor.runner.features if isinstance(each, Drafts))
        self.model, self._draft, self._computed = drafts.model, drafts.model.draft, drafts.computed
        self._rows: dict[tuple[int, int], torch.Tensor] = {}
        drafts.model.draft, drafts.computed = self._record, self._record_rows  # type: ignore[method-assign]
        fork = drafts.fork
        drafts.fork = lambda parent, child: (self._fork_rows(parent, child), fork(parent, child))[1]  # type: ignore[method-assign]

    def _record_rows(self, batch: StepBatch, positions: np.ndarray, hidden: torch.Tensor) -> None:
        slots = np.repeat(batch.table_slots, batch.num_tokens)
        self._rows |= zip(zip(slots.tolist(), positions.tolist(), strict=True), hidden.clone(), strict=True)
        self._slots = {id(state.token_ids): state.table_slot for state in batch.states}
        self._computed(batch, positions, hidden)

    def _fork_rows(self, parent: int, child: int) -> None:
        self._rows |= {(child, position): row for (slot, position), row in self._rows.items() if slot == parent}

    def _record(self, texts: list[Text]) -> None:
        self._draft(texts)
        for text in texts:
            if text.draft:
                token_ids, slot = [*text.token_ids, *text.new], self._slots[id(text.token_ids)]
                first = self.model._cached[text.seq_id].state.dropped
                hidden = [self._rows[slot, position] for position in range(first, len(token_ids) - 1)]
                self.found.append((token_ids, torch.stack(hidden), first, text.draft))

    def assert_drafts(self, path: Path) -> None:
        """Sixty of them are those of the module, which has drafted nothing before."""
        assert len(self.found) > 20
        mtp = Reference(path)
        for token_ids, hidden, first, draft in self.found[:: 1 + len(self.found) // 60]:
            assert draft == mtp.draft(token_ids, hidden, first, len(draft))
        counts = self.llm.stats().drafts
        assert 0 < sum(counts.right) < counts.tokens


@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe", "glm4-moe-lite"])
def test_a_gguf_file_drafts_as_the_checkpoint(tmp_path: Path, name: str) -> None:
    file, found = write_with_mtp(tmp_path / "model.gguf", name), []
    for path in (file, tmp_path / "transformers"):
        recorder = Recorder(path)
        drafted = tokens(recorder.llm, random_prompts(256, (20, 7)), greedy(30))
        found.append((drafted, [draft for _, _, _, draft in recorder.found]))
    assert found[0] == found[1] and len(found[0][1]) > 20


class Reference:
    def __init__(self, path: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\.", r"^mtp\."]  # others say 61
        kinds = {"mtp_mlp_layer_types": ["sparse"], "mtp_layer_types": ["full_attention"]}
        self.model.config.update({"num_mtp_layers": 1, **kinds})
        self.mtp = MtpModel.from_pretrained(self.model)

    @torch.inference_mode()
    def hidden(self, token_ids: list[int]) -> torch.Tensor:
        return self.model.model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def draft(self, token_ids: list[int], hidden: torch.Tensor, first: int, count: int) -> list[int]:
        """The layer once more for each token, over all of the text."""
        read, states = token_ids[first + 1 :], hidden.unsqueeze(0)
        for _ in range(count):
            positions = torch.arange(first, first + len(read)).unsqueeze(0)
            out = self.mtp.forward_layer(0, states, positions, None, torch.tensor([read]))
            states = torch.cat((states, out[:, -1:]), 1)
            read = [*read, int(self.model.lm_head(out[0, -1]).argmax())]
        return read[-count:]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_the_layer(tmp_path: Path, name: str) -> None:
    path = make_with_mtp(tmp_path, name)
    recorder, reference = Recorder(path), Reference(path)
    prompts = random_prompts(256, lengths=(1, 17, 40))
    assert tokens(recorder.llm, prompts, greedy(30)) == tokens(make_llm(path), prompts, greedy(30))
    recorder.assert_drafts(path)
    for token_ids, hidden, first, _ in recorder.found[-5:]:
        assert first == 0
        torch.testing.assert_close(hidden, reference.hidden(token_ids)[:-1], atol=1e-4, rtol=1e-4)


ENGINES: dict[str, dict[str, Any]] = {
    "blocks of 1": {"block_size": 1, "num_gpu_blocks_override": 1200},
    "short chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preemption": {"num_gpu_blocks_override": 14},
    "swap": {"num_gpu_blocks_override": 14, "kv_offloading_size": 0.01, "swap": "always"},
    "planned ahead": {"async_scheduling": True},
    "standalone": {
        "block_size": 1,
        "num_gpu_blocks_override": 400,
        "compression": CompressionConfig(
            method="keydiff", buffer=4, policy="standalone", window_blocks=24, retain_blocks=8
        ),
    },
}


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_those_without(checkpoint: Path, name: str) -> None:
    """Rejected pairs leave no trace, and chunks, preemptions and cached prefixes none either."""
    options, prompts = ENGINES[name], random_prompts(256, lengths=(2, 17, 40, 63))
    recorder, without = Recorder(checkpoint, **options), make_llm(checkpoint, **options)
    for _ in range(2):  # the second time with cached prefixes
        assert tokens(recorder.llm, prompts, greedy(50)) == tokens(without, prompts, greedy(50))
    recorder.assert_drafts(checkpoint)
    stats = recorder.llm.stats()
    assert bool(stats.preemptions) == (options.get("num_gpu_blocks_override") == 14)
    assert bool(stats.entries_evicted) == ("compression" in options)
    assert {first > 0 for _, _, first, _ in recorder.found} == {True, False}


def test_recorded_passes_tell_their_hidden_states(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, decodes and drafts, filled up to the sizes of recordings. Passes of the layer are recorded, too."""
    records_chunks(monkeypatch)
    recorder, reference = Recorder(checkpoint, attention_backend="reference"), Reference(checkpoint)
    prompts = random_prompts(256, lengths=(1, 17, 40))
    runner, replayed = recorder.llm.llm_engine.executor.runner, ([], [])
    passes, compute = list[MTPModel](), MTPModel._pass
    monkeypatch.setattr(MTPModel, "_pass", lambda model, *args: passes.append(model) or compute(model, *args))
    for forward_pass, of_pass in zip(runner.recorded, replayed, strict=True):
        forward_pass.use_graphs(lambda step, found=of_pass: lambda: found.append(1) or step(), runner.cache.num_blocks)
    assert tokens(recorder.llm, prompts, greedy(30)) == tokens(make_llm(checkpoint), prompts, greedy(30))
    assert [len(each) for each in replayed] == [recorder.llm.stats().steps, passes.count(passes[0])]
    recorder.assert_drafts(checkpoint)
    for token_ids, hidden, _, _ in recorder.found[-5:]:
        torch.testing.assert_close(hidden, reference.hidden(token_ids)[:-1], atol=1e-4, rtol=1e-4)


def test_forks_and_aborts(checkpoint: Path) -> None:
    recorder = Recorder(checkpoint)
    engine, (prompt, other) = recorder.llm.llm_engine, random_prompts(256, lengths=(30, 40))
    engine.add_request("0", prompt, greedy(30, n=3))
    engine.add_request("1", other, greedy(30))
    for _ in range(9):
        engine.step()
    engine.abort("1")
    while engine.has_unfinished_requests():
        engine.step()
    recorder.assert_drafts(checkpoint)
    assert {(token_ids[:30] == prompt["prompt_token_ids"], first) for token_ids, _, first, _ in recorder.found} == {
        (True, 0),
        (False, 0),
    }


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2}], ids=["plain", "more"]
)
def test_draws_are_those_without(checkpoint: Path, options: dict[str, Any]) -> None:
    found = []
    for llm in (make_llm(checkpoint), recorder := Recorder(checkpoint)):
        llm = llm.llm if isinstance(llm, Recorder) else llm
        params = SamplingParams(temperature=0.4, n=2, max_tokens=40, ignore_eos=True, seed=3, **options)
        outputs = llm.generate(random_prompts(256, lengths=(5, 30)), params, use_tqdm=False)
        found.append([(each.token_ids, each.logprobs) for output in outputs for each in output.outputs])
    assert found[0] == found[1]
    assert sum(recorder.llm.stats().drafts.right) > 0


def test_drafts_follow_a_grammar(tmp_path: Path, shared_dir: Path) -> None:
    path = make_with_mtp(tmp_path, "glm4-moe", vocab_size=512)
    shutil.copy(shared_dir / "data" / "models" / "stories260K-fp32" / "tokenizer.json", path)
    rule = StructuredOutputsParams(regex="(the dog |a cat ){3,30}")
    params = SamplingParams(temperature=0.4, max_tokens=60, seed=2, structured_outputs=rule)
    recorder, prompt = Recorder(path), "a cat the dog "
    found = [llm.generate(prompt, params, use_tqdm=False)[0] for llm in (make_llm(path), recorder.llm)]
    texts = [output.outputs[0].text for output in found]
    assert texts[0] == texts[1] and sum(recorder.llm.stats().drafts.right)
    tokenizer, begin = recorder.llm.get_tokenizer(), len(found[0].prompt_token_ids)
    for token_ids, _, _, draft in recorder.found:
        text = tokenizer.decode([*token_ids[begin:], *draft]).lstrip()
        rest = re.sub("the dog |a cat ", "", text)
        assert "the dog ".startswith(rest) or "a cat ".startswith(rest), text


def test_drafts_after_a_pass_that_failed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states of a text that was longer than a recorded pass are not read for other texts."""
    monkeypatch.setattr(graph_sizes, "LEAST_CHUNK_TOKENS", 16)
    recorder = Recorder(checkpoint, max_num_seqs=2)
    long, short = random_prompts(256, (40, 7))
    engine = recorder.llm.llm_engine
    engine.add_request("long", long, greedy(8))
    with monkeypatch.context() as failing, pytest.raises(MemoryError):
        failing.setattr(recorder.model.model, "forward", MagicMock(side_effect=MemoryError))
        engine.step()
    engine.abort("long")
    engine.scheduler.speculation.cost = None  # all are tried, as before
    assert len(tokens(recorder.llm, [short])[0]) == 128
    recorder.assert_drafts(checkpoint)


def test_hidden_states_that_nobody_reads_are_bounded(checkpoint: Path) -> None:
    """Where nothing pays for long, drafts begin later, after what came since."""
    recorder = Recorder(checkpoint, **{**ENGINES["standalone"], "num_gpu_blocks_override": 80})
    engine = recorder.llm.llm_engine
    engine.scheduler.speculation.cost = StepCost([1, 2], [1.0, 9.0], [0.0, 0.0], [1.0])
    engine.add_request("0", random_prompts(256, lengths=(20,))[0], greedy(200))
    (drafts,) = (each for each in engine.executor.runner.features if isinstance(each, Drafts))
    for _ in range(110):
        engine.step()
        assert sum(each.num_tokens for each in drafts._hidden.values()) <= 81
    assert not recorder.found
    engine.scheduler.speculation.cost = None
    while engine.has_unfinished_requests():
        engine.step()
    recorder.assert_drafts(checkpoint)
    assert {first for _, _, first, _ in recorder.found} == {81}


def test_weights_of_integers_draft(checkpoint: Path) -> None:
    prompts = random_prompts(256, lengths=(5, 30))
    recorder = Recorder(checkpoint, quantization="int8")
    assert tokens(recorder.llm, prompts) == tokens(make_llm(checkpoint, quantization="int8"), prompts)
    assert sum(recorder.llm.stats().drafts.right)


def test_the_pool_and_hidden_states_are_counted(checkpoint: Path) -> None:
    stats = Recorder(checkpoint, num_gpu_blocks_override=50).llm.stats()
    assert stats.draft_pool_bytes == 50 * (stats.block_bytes // LAYERS + 16 * 64 * 4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen3", {}, "method='mtp' is not allowed: "),
        ("glm4-moe", {"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not allowed: 1 with speculative_config"),
    ],
)
def test_what_cannot_draft_is_refused(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    make_checkpoint(tmp_path, **FAMILIES[name])
    edit(tmp_path, num_nextn_predict_layers=1)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(tmp_path, speculative_config={"method": "mtp"}, **options)


def test_a_checkpoint_without_the_weights_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **FAMILIES["glm4-moe"])
    edit(tmp_path, num_nextn_predict_layers=1)
    with pytest.raises(CheckpointError, match=re.escape("lacks model.layers.3.enorm.weight")):
        LLM(tmp_path, speculative_config={"method": "mtp"})
