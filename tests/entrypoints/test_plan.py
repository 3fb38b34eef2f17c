"""`kvllm plan`: figures known from elsewhere, those of checkpoints, and those of engines that run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from benchmarks.common.shapes import SHAPES
from kvllm import LLM, SamplingParams
from kvllm.config import EngineConfig
from kvllm.engine_args import DEFAULT_MODEL, EngineArgs
from kvllm.engine_builder import cache_shape
from kvllm.entrypoints import cli
from kvllm.entrypoints.engine_flags import parse_compression
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import PagedKVCache
from kvllm.memory_plan import plan_memory
from kvllm.models.config import load_model_config
from kvllm.simulation.cost import CostModel
from kvllm.simulation.hardware import load_hardware
from tests.helpers.checkpoints import edit, make_checkpoint
from tests.helpers.compressions import paper_compression
from tests.helpers.families import FAMILIES

GIB = 1 << 30
LLAMA_3_8B = SHAPES["8b"] | {"max_position_embeddings": 8192}
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def config_file(directory: Path, keys: dict[str, Any]) -> Path:
    path = directory / "model.json"  # a config.json is read under any name
    path.write_text(json.dumps(keys))
    return path


def figures(capsys: pytest.CaptureFixture[str], model: Path, *options: str) -> dict[str, Any]:
    cli.main(["plan", "--model", str(model), "--json", *options])
    return json.loads(capsys.readouterr().out)


def test_llama_3_8b(tmp_path, capsys):
    model = config_file(tmp_path, LLAMA_3_8B)
    found = figures(capsys, model, "--input-length", "4096", "--num-sequences", "32")
    assert found["kv_bytes"] == 16 * GIB
    assert found["bytes_per_token"] == 131072
    assert found["layer_token_units"] == 32 * 4096
    assert found["blocks_per_sequence"] == {"full": 256}
    assert found["weights_bytes"] == 2 * 8_030_261_248  # parameters as published


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("float16", 2), ("half", 2), ("bfloat16", 2), ("float32", 4), ("float", 4)]
)
def test_dtypes_are_those_of_serve(dtype, itemsize, tmp_path, capsys):
    model = config_file(tmp_path, LLAMA_3_8B | {"torch_dtype": "float16"})
    assert figures(capsys, model, "--dtype", dtype)["weights_bytes"] == itemsize * 8_030_261_248
    assert figures(capsys, model)["weights_bytes"] == 2 * 8_030_261_248  # its own


def test_llama_3_70b(tmp_path, capsys):
    model = config_file(tmp_path, LLAMA_3_70B)
    found = figures(capsys, model, "--input-length", "4096", "--num-sequences", "64")
    assert found["kv_bytes"] == 80 * GIB
    assert found["weights_bytes"] == 2 * 70_553_706_496


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters(ranks, tmp_path, capsys):
    """Four times both matrices of each product, whose projections lie beside each other; a rank's columns or rows."""
    model = config_file(tmp_path, LLAMA_3_8B)
    options = ["--gpu-memory", "80GB", "--tensor-parallel-size", str(ranks)]
    plain = figures(capsys, model, *options)
    found = figures(capsys, model, *options, "--enable-lora", "--max-loras", "4", "--max-lora-rank", "8")
    attention = 24 * (4096 + 6144 // ranks) + 8 * (4096 // ranks + 4096)
    mlp = 16 * (4096 + 2 * 14336 // ranks) + 8 * (14336 // ranks + 4096)
    assert found["adapter_bytes_per_rank"] == 4 * 2 * 32 * (attention + mlp)
    assert plain["pool_bytes_per_rank"] - found["pool_bytes_per_rank"] == found["adapter_bytes_per_rank"]
    assert "adapter_bytes_per_rank" not in plain
    with pytest.raises(SystemExit):
        figures(capsys, model, "--enable-lora", "--max-lora-rank", "65")
    assert "max_lora_rank=65 is not allowed: between 1 and 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "key", "value"),
    [
        ("int8", 132, 132),
        ("int4_hadamard", 68, 68),
        ("int6_int4", 100, 68),
        ("int6_int4_hadamard", 100, 68),
        ("int4", 68, 68),
    ],
)
def test_quantized_kv_pairs(dtype, key, value, tmp_path, capsys):
    """A scale of four bytes lies beside each key and each value of a head. Sizes that differ are printed."""
    model = config_file(tmp_path, LLAMA_3_8B)
    found = figures(capsys, model, "--kv-cache-dtype", dtype)
    assert found["bytes_per_token"] == 32 * 8 * (key + value)
    cli.main(["plan", "--model", str(model), "--kv-cache-dtype", dtype])
    both = f"of a KV pair, the key takes {8 * key:,} bytes and the value {8 * value:,}"
    assert (both in capsys.readouterr().out.splitlines()) == (key != value)


def test_a_head_dim_that_cannot_be_rotated_is_refused(tmp_path, capsys):
    model = config_file(tmp_path, LLAMA_3_8B | {"head_dim": 96})
    with pytest.raises(SystemExit):
        cli.main(["plan", "--model", str(model), "--kv-cache-dtype", "int6_int4_hadamard"])
    assert "needs a head_dim that is a power of two, the model has 96" in capsys.readouterr().err


HALF_SLIDING = LLAMA_3_8B | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 16,
}


@pytest.mark.parametrize(
    ("kinds", "units", "blocks"),
    [
        (["full_attention"] * 32, 32_000, {"full": 63}),
        (["sliding_attention"] * 32, 4_096, {"sliding": 9}),
        (["sliding_attention", "full_attention"] * 16, 18_048, {"full": 63, "sliding": 9}),
    ],
)
def test_layers_with_a_window(kinds, units, blocks, tmp_path, capsys):
    """1,000 tokens in 32 layers, with a window of 128."""
    model = config_file(tmp_path, HALF_SLIDING | {"layer_types": kinds})
    found = figures(capsys, model, "--input-length", "1000", "--block-size", "16")
    assert found["layer_token_units"] == units
    assert found["kv_bytes"] == units * 4096
    assert found["blocks_per_sequence"] == blocks


def test_concurrency_counts_places_that_no_layer_fills(tmp_path, capsys):
    """Five full layers, which a block holds, and 27 with a window: six parts, of which the last has two layers."""
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(32)]
    model = config_file(tmp_path, HALF_SLIDING | {"layer_types": kinds})
    options = ("--input-length", "1000", "--block-size", "16", "--gpu-memory", "40GB")
    found = figures(capsys, model, *options, "--compression", "method=keydiff,window_blocks=3,buffer=4")
    pool, block = found["pool_bytes_per_rank"], 5 * 16 * 4096
    assert found["kv_bytes"] == (5 * 1000 + 27 * 128) * 4096  # of what is attended, not padded
    assert found["sequences_at_once"]["nothing released"] == pool // (32 * 16 * 4096) // 63
    assert found["sequences_at_once"]["windows"] == pool // block // (63 + 6 * 9)
    # 1000 tokens: 20 windows of 3 blocks keep one each, and three blocks lie after them.
    assert found["sequences_at_once"]["compression"] == pool // block // (20 + 3 + 6 * 9)
    cli.main(["plan", "--model", str(model), *options])
    assert f" {pool // block:,} blocks of 16 tokens in 5 of 32 layers; " in capsys.readouterr().out


def test_concurrency_is_what_the_memory_leaves(tmp_path, capsys):
    """Two devices hold half of the weights and half of the KV heads each."""
    model = config_file(tmp_path, LLAMA_3_8B)
    options = ("--gpu-memory", "80GB", "--gpu-memory-utilization", "0.9", "--tensor-parallel-size", "2")
    options += ("--max-model-len", "8192", "--block-size", "256")
    found = figures(capsys, model, *options, "--compression", "method=kara,window_blocks=3")
    norms = 65 * 4096  # which both hold
    pool = 72 * 10**9 - 2 * ((8_030_261_248 - norms) // 2 + norms)
    assert found["pool_bytes_per_rank"] == pool
    blocks = pool // (256 * 131072 // 2)
    assert found["sequences_at_once"]["nothing released"] == blocks // 32
    # 8192 tokens: 8 windows of 3 blocks keep one each, and two blocks lie after the window that is complete last.
    assert found["sequences_at_once"]["compression"] == blocks // (10 + 2)
    assert found["compressed_kv_bytes"] == (10 * 256 + 2 * 256) * 131072


def test_weights_are_those_of_the_checkpoint():
    with safe_open(DEFAULT_MODEL / "model.safetensors", "np") as file:
        names = file.keys()
        numbers = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    model = load_model_config(DEFAULT_MODEL)
    assert plan_memory(model, EngineConfig(num_blocks=1, max_model_len=64), "float32").weights_bytes == 4 * numbers


@pytest.mark.parametrize(
    "compression", [None, paper_compression(method="mean_attention", window_blocks=8, retain_blocks=2, buffer=16)]
)
def test_blocks_have_the_bytes_of_the_engine(compression):
    args = EngineArgs(block_size=16, compression=compression)
    plan = plan_memory(args.model_config, args.engine_config, "float32")
    assert plan.rank_block_bytes == cache_shape(args).bytes_per_block
    assert plan.pair_bytes * 16 * args.model_config.num_layers == plan.rank_block_bytes


def test_latents_are_counted_once(tmp_path):
    make_checkpoint(tmp_path, **FAMILIES["glm4-moe-lite"])
    args = EngineArgs(tmp_path, dtype="float32", block_size=16)
    model, shape = args.model_config, cache_shape(args)
    plan = plan_memory(model, args.engine_config, "float32")
    assert plan.rank_block_bytes == shape.bytes_per_block == model.num_layers * 16 * 4 * (24 + 8)
    assert CostModel(load_hardware("h100"), model, "float32").kv_pair_bytes == shape.pair_bytes == 4 * (24 + 8)
    assert PagedKVCache(shape, 3).data.nbytes == 3 * shape.bytes_per_block
    for option in ("kv_cache_dtype", "kv_offload_dtype"):
        options: dict[str, Any] = {"kv_offloading_size": 1, option: "int6_int4"}
        with pytest.raises(ConfigError, match=f"{option}='int6_int4' stores .* give 'auto' or one of 'fp8_e4m3'"):
            cache_shape(EngineArgs(tmp_path, **options))


def test_groups_have_the_blocks_of_the_engine(tmp_path):
    """Two layers of five attend all tokens, so the other three have two parts."""
    kinds = ["full_attention" if layer in (1, 4) else "sliding_attention" for layer in range(5)]
    options: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 20, "layer_types": kinds}
    make_checkpoint(tmp_path, "qwen3", head_dim=16, num_hidden_layers=5, **options)
    args = EngineArgs(tmp_path, block_size=4, max_model_len=200, num_gpu_blocks_override=200)
    plan = plan_memory(args.model_config, args.engine_config, "float32")
    assert plan.rank_block_bytes == cache_shape(args).bytes_per_block == 2 * 4 * plan.pair_bytes
    llm = LLM(tmp_path, block_size=4, max_model_len=200, num_gpu_blocks_override=200, dtype="float32")
    prompt, output = 4, 150  # in one chunk no larger than a block, so that decoding holds the most
    sampling = SamplingParams(temperature=0, max_tokens=output + 1, ignore_eos=True)
    llm.generate([[5] * prompt], sampling, use_tqdm=False)
    assert llm.stats().peak_blocks == plan.blocks_held(prompt + output, prompt, compressed=False)


def test_shares_by_layer_take_the_blocks_of_the_engine():
    """Each layer has blocks of its own. The first one keeps all of its windows, the last one half."""
    compression = parse_compression(
        "method=keydiff,policy=periodic,period=1,window_blocks=4,buffer=16,layer_groups=1-2:1/0:4/3:2"
    )
    sizes = {"block_size": 16, "max_model_len": 512, "compression": compression}
    args = EngineArgs(**sizes)
    plan = plan_memory(args.model_config, args.engine_config, "float32")
    assert plan.rank_block_bytes == cache_shape(args).bytes_per_block == 16 * plan.pair_bytes
    prompt, output = 4, 300
    llm = LLM(num_gpu_blocks_override=200, **sizes)
    sampling = SamplingParams(temperature=0, max_tokens=output + 1, ignore_eos=True)
    [result] = llm.generate([[5] * prompt], sampling, use_tqdm=False)
    assert llm.stats().peak_blocks == plan.blocks_held(prompt + output, prompt, compressed=True)
    windows = llm.stats().windows_compressed
    assert windows >= 4
    assert plan.compressed_kv_bytes(prompt + output, prompt) == plan.pair_bytes * (
        4 * (prompt + output) - windows * 16 * (3 + 3 + 0 + 2)
    )
    assert result.metrics.missing_entries == windows * 16 * 8 // 4


def test_compressed_length_is_what_an_engine_holds():
    """A sequence that is compressed whenever a window is complete holds what the plan says."""
    compression = paper_compression(method="kara", period=1, window_blocks=4, retain_blocks=2, buffer=16)
    prompt, output = 40, 300
    llm = LLM(block_size=16, compression=compression, kv_cache_memory_bytes=1 << 24, max_model_len=512)
    sampling = SamplingParams(temperature=0, max_tokens=output + 1, ignore_eos=True)
    [result] = llm.generate([[5] * prompt], sampling, use_tqdm=False)
    config = EngineConfig(num_blocks=1, max_model_len=512, block_size=16, compression=compression)
    plan = plan_memory(load_model_config(DEFAULT_MODEL), config, "float32")
    held = prompt + output - result.metrics.missing_entries
    assert held < prompt + output - 100
    assert plan.compressed_length(prompt + output, prompt) == held


def test_report_and_plot(tmp_path, capsys):
    model, plot = config_file(tmp_path, LLAMA_3_8B), tmp_path / "held.png"
    pytest.importorskip("matplotlib", reason='the plot needs matplotlib: pip install "kvllm[bench]"')
    cli.main(
        [
            "plan",
            "--model",
            str(model),
            "--gpu-memory",
            "24GiB",
            "--compression",
            "method=kara,period=64,window_blocks=3",
            "--block-size",
            "256",
            "--plot",
            str(plot),
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert "weights: 14.96 GiB; KV pairs of a token in all layers: 131,072 bytes" in lines
    assert any(line.split() == ["8,192", "8,192", "1,024.0", "3,072", "384.0"] for line in lines)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu-memory", "16GB"], "weights"),
        (["--tensor-parallel-size", "3", "--gpu-memory", "80GB"], "3"),
        (["--input-length", "0"], "input_length=0"),
        (["--prompt-length", "9000"], "prompt_length=9000"),
        (["--num-sequences", "0"], "num_sequences=0"),
        (["--max-model-len", "0"], "max_model_len=0"),
        (["--compression", "window_block=3"], "'window_block'; did you mean window_blocks?"),
        (["--kv-cache-dtype", "int2"], "kv_cache_dtype='int2'"),
    ],
)
def test_wrong_values_end_with_a_message(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--model", str(config_file(tmp_path, LLAMA_3_8B)), *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--model", str(config_file(tmp_path, LLAMA_3_8B)), "--plot", str(tmp_path / "no" / "a.png")])
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/no/a.png: No such file or directory\n"


def test_a_wrong_size_is_a_wrong_usage(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--model", str(tmp_path), "--gpu-memory", "80 gigs"])
    assert ended.value.code == 2
    assert "24GB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3.5", "2 other layers hold no KV pairs: they have a state of"),
        ("falcon-h1", "all layers have, beside KV pairs, a state of"),
    ],
)
def test_states_of_recurrent_layers_are_those_of_the_engine(family, text, tmp_path, capsys):
    """And what they take is missing for sequences."""
    make_checkpoint(tmp_path, **FAMILIES[family])
    options = ("--input-length", "64", "--gpu-memory", "100M")
    found = figures(capsys, tmp_path, *options)
    stats = LLM(tmp_path, max_num_seqs=3, num_gpu_blocks_override=8, enable_prefix_caching=False).stats()
    assert stats.recurrent_state_bytes == 4 * found["state_bytes_per_rank"]
    of_pairs = found["blocks_per_sequence"]["full"] * stats.block_bytes
    at_once = found["pool_bytes_per_rank"] // (of_pairs + found["state_bytes_per_rank"])
    assert found["sequences_at_once"] == {"nothing released": at_once}
    cli.main(["plan", "--model", str(tmp_path), *options])
    assert text in capsys.readouterr().out


def test_groups_that_are_normalized_stay_on_a_rank(tmp_path, capsys):
    make_checkpoint(tmp_path, **FAMILIES["falcon-h1"])
    edit(tmp_path, mamba_rms_norm=True)
    with pytest.raises(SystemExit):
        figures(capsys, tmp_path, "--tensor-parallel-size", "2")
    assert "tensor_parallel_size 2 is more than the model's 1 groups of Mamba-2 heads" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_what_drafts_takes_what_the_engine_says(method, tmp_path, capsys):
    make_checkpoint(tmp_path, **FAMILIES["glm4-moe"])
    make_checkpoint(tmp_path / "draft", "qwen3", head_dim=16)
    edit(tmp_path, num_hidden_layers=2, num_nextn_predict_layers=1)  # the third predicts
    options = {"method": method, "model": str(tmp_path / "draft")} if method == "draft_model" else {"method": method}
    args = EngineArgs(tmp_path, block_size=4, load_format="dummy", speculative_config=options, max_model_len=100)
    stats = LLM(**vars(args)).stats()
    with safe_open(tmp_path / ("draft" if method == "draft_model" else "") / "model.safetensors", "np") as file:
        names = [name for name in list(file.keys()) if method == "draft_model" or name.startswith("model.layers.2.")]
        numbers = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    glue = (3 * 64 + 2 * 64 * 64) * (method == "mtp")  # norms and a projection, which transformers does not write
    arguments = ("--gpu-memory", "1GB", "--block-size", "4", "--max-model-len", "100", "--dtype", "float32")
    without, found = (
        figures(capsys, tmp_path, *arguments, *more) for more in ((), ("--speculative-config", json.dumps(options)))
    )
    assert found["draft_weights_bytes"] == 4 * (numbers + glue)
    assert found["draft_bytes_per_token"] * 4 * stats.num_blocks == stats.draft_pool_bytes
    assert found["pool_bytes_per_rank"] == without["pool_bytes_per_rank"] - found["draft_weights_bytes"]
    block_bytes = stats.block_bytes + stats.draft_pool_bytes // stats.num_blocks
    assert found["sequences_at_once"]["nothing released"] == found["pool_bytes_per_rank"] // block_bytes // 25
    cli.main(["plan", str(tmp_path), "--speculative-config", json.dumps(options)])
    assert "what drafts: " in capsys.readouterr().out


def test_a_model_that_drafts_for_itself_needs_no_other(tmp_path, capsys):
    make_checkpoint(tmp_path, **FAMILIES["qwen3"])
    assert figures(capsys, tmp_path, "--speculative-config", '{"method": "self"}') == figures(capsys, tmp_path)
