"""The comparison with other engines: its arguments, the protocol of its children, and its figures."""

from __future__ import annotations

import json
import random
import re
import sys

import msgspec
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import embeddings, peers
from benchmarks.common import limits, workloads
from benchmarks.peers_engines.environments import PeerFiles, write_gguf_file
from benchmarks.peers_engines.protocol import ChildFailed, call
from benchmarks.peers_engines.registry import ENGINES, ENVIRONMENTS, Environment
from kvllm import LLM, SamplingParams
from kvllm.errors import KvLLMError
from kvllm.models.config import load_model_config
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.waiting import wait_until

tiny = checkpoint_fixture("qwen3", head_dim=16, tie_word_embeddings=True)


def make_run(rate, first_tokens=(1, 2)):
    return peers.Run(
        seconds=100 / rate,
        output_tokens_per_s=rate,
        prompt_seconds=50 / rate,
        decode_tokens_per_s=2 * rate,
        start_seconds=2.5,
        peak_memory_bytes=500 << 20,
        weight_bytes=300 << 20,
        kv="bf16",
        kv_itemsize=2,
        kv_bytes=100 << 20,
        overhead_bytes=100 << 20,
        first_tokens=list(first_tokens),
        version="1.0",
    )


def make_script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat > {path.parent}/job.json\n{text}\n")
    path.chmod(0o755)
    return path


def make_environment(files, name, text):
    """An environment whose interpreter is a script."""
    make_script(files.folder / name / "bin" / "python", text)
    (files.folder / name / "requirements.txt").write_text("\n".join(ENVIRONMENTS[name].requirements) + "\n")


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def recorded():
    """Three rounds: the machine was half as fast in the second."""
    return {
        "kvllm": [make_run(120), make_run(60), make_run(130)],
        "kvllm-int8": [make_run(300)] * 3,
        "openvino": [make_run(100), make_run(50), make_run(100)],
        "vllm": [make_run(80), make_run(80), make_run(80, (1, 3))],
        "llama.cpp-q8_0": [make_run(150, (2, 2))] * 3,
        "llama.cpp-q4_k_m": [make_run(200)] * 3,
    }


# Children


def test_a_child_runs_kvllm_and_measures_it(tiny, tmp_path):
    model = load_model_config(tiny)
    requests = workloads.random_requests(random.Random(0), [(24, 12), (7, 5)], model.vocab_size)
    job = peers.make_job("kvllm", tiny, tiny, model, requests)
    run = msgspec.convert(call(sys.executable, ENGINES["kvllm"].module, job, tmp_path / "log", {}, 120), peers.Run)

    llm = LLM(str(tiny), max_model_len=64)
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    assert run.first_tokens == [output.outputs[0].token_ids[0] for output in outputs]
    assert run.output_tokens_per_s == pytest.approx(17 / run.seconds)
    assert run.start_seconds > run.seconds > run.prompt_seconds > 0
    assert run.decode_tokens_per_s == pytest.approx(15 / (run.seconds - run.prompt_seconds))
    assert run.weight_bytes == sum(file.stat().st_size for file in tiny.glob("*.safetensors"))
    assert run.kv == "f32"
    assert run.kv_bytes == (24 + 12 - 1 + 7 + 5 - 1) * 2 * 3 * 2 * 16 * 4  # KV pairs, K and V, layers, heads, dim
    assert run.overhead_bytes == run.peak_memory_bytes - run.weight_bytes - run.kv_bytes > 0


def test_a_child_drops_kv_pairs_in_a_small_pool(tiny, tmp_path):
    model = load_model_config(tiny)
    requests = workloads.random_requests(random.Random(0), [(24, 200)] * 3, model.vocab_size)
    job = peers.make_job("kvllm-compression", tiny, tiny, model, requests, pool_fraction=0.5)
    run = msgspec.convert(call(sys.executable, ENGINES["kvllm"].module, job, tmp_path / "log", {}, 120), peers.Run)
    assert run.output_tokens_per_s == pytest.approx(600 / run.seconds)
    assert "KV pool of 10 blocks of 32 tokens" in (tmp_path / "log").read_text()  # half of 3 * 7


def test_a_child_that_fails_gives_its_reason(tmp_path):
    model = tmp_path / "absent"
    job = {"action": "run", "checkpoint": str(model), "prepared": str(model), "options": {}}
    job |= {"prompts": [[1]], "output_lengths": [1], "vocab_size": 8, "kv_numbers": 1, "threads": 1, "pool_fraction": 1}
    with pytest.raises(ChildFailed, match=r"CheckpointError: .*absent is not a directory"):
        call(sys.executable, ENGINES["kvllm"].module, job, tmp_path / "log", {}, 120)


def test_a_child_that_hangs_is_ended_with_what_it_started(tmp_path):
    sleeper = make_script(tmp_path / "python", f"sleep 60 & echo $! > {tmp_path}/pid; wait")
    with pytest.raises(ChildFailed, match="no result after 1 s"):
        call(sleeper, "module", {}, tmp_path / "log", {}, 1)
    worker = int((tmp_path / "pid").read_text())
    wait_until(lambda: not runs(worker), "the end of what it started")  # a signal takes its time to arrive


@pytest.mark.long
def test_an_environment_that_cannot_be_made_gives_its_reason(tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "vllm", Environment((f"{tmp_path}/no-such-package",)))
    checkpoints, failures = peers.prepare(PeerFiles(tmp_path / "peers"), ["kvllm", "vllm"], tmp_path)
    assert checkpoints == {"kvllm": tmp_path}
    assert failures["vllm"].startswith("not installed: ERROR: ") and "no-such-package" in failures["vllm"]


def test_llama_cpp_gets_the_weights_of_the_checkpoint(tiny, tmp_path):
    """Read by KvLLM, which gives the greedy tokens of both."""
    write_gguf_file(tiny, tmp_path / "bf16.gguf")
    tokens = []
    for path in (tiny, tmp_path / "bf16.gguf"):
        llm = LLM(str(path), dtype="bfloat16", max_model_len=64)
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
        tokens.append(llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]


# Figures


def test_ratios_are_taken_within_a_round_and_between_weights_of_one_format():
    ratios = peers.ratios(recorded())
    assert list(ratios) == ["openvino", "vllm", "llama.cpp-q8_0"]  # KvLLM has no runs with 4 bits
    assert ratios["openvino"] == pytest.approx({"median": 1.2, "min": 1.2, "max": 1.3})
    assert ratios["vllm"] == pytest.approx({"median": 1.5, "min": 0.75, "max": 1.625})
    assert ratios["llama.cpp-q8_0"] == pytest.approx({"median": 2, "min": 2, "max": 2})


def test_kvllm_that_drops_pairs_is_compared_with_all_peers_and_with_itself():
    runs = recorded() | {"kvllm-compression": [make_run(150)] * 3, "openvino-evicts": [make_run(125)] * 3}
    assert peers.ratios(runs)["openvino-evicts"]["median"] == pytest.approx(1.2)
    assert peers.eviction_ratios(runs) == {
        "kvllm-compression": pytest.approx({"median": 1.25, "min": 150 / 130, "max": 2.5})
    }


def test_the_table_shows_medians_and_why_an_engine_did_not_run():
    text = peers.show(recorded(), {"llama.cpp": "not installed: no space"})
    lines = {line.split()[0]: line for line in text.splitlines()}
    cells = ["openvino", "bf16", "bf16", "100.0 (50.0-100.0)", "1.20 (1.20-1.30)", "0.50 (0.50-1.00)"]
    cells += ["200.0 (100.0-200.0)", "2.5", "1.67", "100", "2 of 2"]
    assert re.split(r"  +", lines["openvino"]) == cells
    assert lines["llama.cpp-q8_0"].endswith("1 of 2")
    assert "llama.cpp did not run: not installed: no space" in text


def test_kvllm_is_compared_with_the_best_peer_of_each_round():
    best = peers.over_best_peers(recorded())
    assert best["kvllm"]["output tokens/s"] == pytest.approx({"median": 1.2, "min": 60 / 80, "max": 1.3})
    assert best["kvllm-int8"]["prompt"] == pytest.approx({"median": 2, "min": 2, "max": 2})
    quiet = {"kvllm": [make_run(120)], "vllm": [msgspec.structs.replace(make_run(80), prompt_seconds=None)]}
    assert set(peers.over_best_peers(quiet)["kvllm"]) == {"output tokens/s", "decode tokens/s"}


def test_the_floor_counts_weights_pairs_and_products(tiny, monkeypatch):
    model = load_model_config(tiny)  # 3 layers, 2 KV heads of 16
    heads = model.num_query_heads
    layers = limits.matrix_numbers(model) - model.vocab_size * model.hidden_size
    slow = limits.Peak(read_bytes_per_s=1e6, operations_per_s=1e18)
    monkeypatch.setattr(limits.machine, "last_level_cache", lambda: 1000)
    found = limits.floor(model, [(10, 3), (20, 2)], 5000, 4, slow)
    pairs = 11 + 12 + 21  # of the decodes
    assert found.decode_tokens_per_s == pytest.approx(3e6 / (2 * 5000 + pairs * 3 * 2 * 2 * 16 * 4))
    assert limits.floor(model, [(10, 3)], 999, 4, slow).prompt_seconds < 1e-6  # they stay in the cache

    weak = limits.Peak(read_bytes_per_s=1e18, operations_per_s=1e6)
    products = 10 * layers + model.vocab_size * model.hidden_size + 2 * heads * 16 * 3 * sum(range(1, 11))
    assert limits.floor(model, [(10, 3)], 5000, 4, weak).prompt_seconds == pytest.approx(2 * products / 1e6)


def test_rounds_alternate_and_a_failure_does_not_stop_the_others(tmp_path):
    files, order = PeerFiles(tmp_path), tmp_path / "order"
    result = msgspec.json.encode(make_run(100)).decode()
    breaks = f"[ $(grep -c vllm {order}) = 2 ] && echo 'RuntimeError: no such instruction' >&2 && exit 1"
    for name in ("openvino", "vllm", "llama_cpp"):
        make_environment(
            files, name, f"echo {name} >> {order}; {breaks if name == 'vllm' else 'true'}; echo '{result}'"
        )
    runs, failures = peers.run_rounds(files, {"llama.cpp": {}, "vllm": {}, "openvino": {}}, 3)
    forward, back = ["llama_cpp", "vllm", "openvino"], ["openvino", "vllm", "llama_cpp"]
    assert order.read_text().split() == [*forward, *back, "llama_cpp", "openvino"]
    assert runs == {"llama.cpp": [make_run(100)] * 3, "openvino": [make_run(100)] * 3}
    assert failures == {"vllm": "RuntimeError: no such instruction"}


def test_an_engine_runs_again_beside_processes_that_compute(tmp_path):
    """The stand-in for an engine reports as many tokens per second as it finds processes of that kind, and 2 more."""
    files = PeerFiles(tmp_path)
    result = msgspec.json.encode(make_run(1234)).decode()
    count = "n=$(( $(pgrep -fc '^[^ ]*python[^ ]* -c while True: pass') + 2 ))"
    make_environment(files, "vllm", f"{count}; echo '{result}' | sed \"s/1234/$n/\"")
    runs, failures = peers.run_rounds(files, {"vllm": {}}, 2, busy=2)
    assert failures == {} and [run.kept_beside_work for run in runs["vllm"]] == [2, 2]
    assert [run.output_tokens_per_s for run in runs["vllm"]] == [2, 2]  # they end with the run
    assert "vllm beside busy processes: 200%" in peers.show(runs, {})
    assert peers.kept_shares(recorded()) == {}


def test_perplexity_of_a_gguf_file_is_that_of_the_model(tiny, tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    write_gguf_file(tiny, file)
    monkeypatch.setattr(peers, "WINDOW", 16)
    rng = random.Random(0)
    windows = [[rng.randrange(64) for _ in range(16)] for _ in range(3)]
    job = peers.make_job("kvllm-gguf", file, file, load_model_config(file), [workloads.Request([0] * 16, 1)])
    found = peers.perplexities(PeerFiles(tmp_path / "peers"), {"kvllm-gguf": job}, windows)

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor(windows)).logits[:, 8:-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(windows)[:, 9:].flatten())
    assert found["kvllm-gguf"] == pytest.approx(loss.exp().item(), rel=0.01)  # bfloat16


# The script


def test_peers_writes_a_table_and_json(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(workloads.WORKLOADS, "B", lambda rng: [(16, 6)])
    arguments = ["--model", str(tiny), "--workloads", "B", "--engines", "kvllm", "--rounds", "2"]
    peers.benchmark([*arguments, "--environments", str(tmp_path / "peers"), "--output", str(tmp_path)])

    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "peers.json").read_text())
    assert content["command"] in printed and content["machine"]["cores"] >= 1
    workload = content["workloads"]["B"]
    assert (workload["requests"], workload["prompt_tokens"], workload["output_tokens"]) == (1, 16, 6)
    assert workload["failures"] == workload["ratios"] == {}
    assert len(workload["engines"]["kvllm"]) == 2
    assert content["peak"]["read_bytes_per_s"] > 1e8 and content["peak"]["operations_per_s"] > 1e8
    assert workload["floors"]["kvllm"]["decode_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "absent"], "absent is not a directory"),
        (["--rounds", "0"], "--rounds=0 is not allowed: at least 1"),
        (["--perplexity", "text"], "--perplexity=.* is not allowed: only with a --model of GGUF"),
        (["--pool-fraction", "1.5"], "--pool-fraction=1.5 is not allowed: above 0 and at most 1"),
        (
            ["--pool-fraction", "0.5", "--engines", "vllm"],
            r"--engines=.* is not allowed: --pool-fraction needs",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(arguments, message, capsys, tmp_path):
    with pytest.raises(KvLLMError, match=message):
        peers.benchmark([*arguments, "--environments", str(tmp_path)])
    assert capsys.readouterr().out == ""


def test_a_gguf_file_is_for_engines_that_load_it(tiny, tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf_file(tiny, file)
    engines = peers.parse_arguments(["--model", str(tmp_path)]).engines  # the directory that holds it
    assert {"kvllm-gguf", "llama.cpp-gguf", "openvino", "vllm"} <= set(engines)
    assert not {"kvllm", "llama.cpp"} & set(engines) and "kvllm-gguf" not in peers.parse_arguments([]).engines
    checkpoints, failures = peers.prepare(PeerFiles(tmp_path), ["kvllm-gguf", "openvino"], file)
    assert checkpoints == {"kvllm-gguf": file}
    assert failures == {"openvino": "it is given safetensors alone here"}


def test_a_small_pool_is_for_engines_that_have_one():
    assert not {"kvllm-compression", "openvino-evicts"} & set(peers.parse_arguments([]).engines)
    small = peers.parse_arguments(["--pool-fraction", "0.5"]).engines
    assert {"kvllm", "kvllm-compression", "openvino", "openvino-evicts"} <= set(small)
    assert "llama.cpp" not in small


def test_every_environment_is_pinned_and_used():
    used = {engine.environment for engine in ENGINES.values()} | {*embeddings.ENGINES.values()}
    assert used == {None, *ENVIRONMENTS}
    for environment in ENVIRONMENTS.values():
        assert all("==" in requirement for requirement in environment.requirements)
