"""The values of flags: sizes, names, and the settings of compression."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace

import pytest

from kvllm import CompressionConfig, ConfigError, Pressure
from kvllm.config import LayerGroup
from kvllm.engine_args import REFUSED, EngineArgs
from kvllm.entrypoints import cli
from kvllm.entrypoints.engine_flags import CHOICES, engine_args_from, parse_compression
from kvllm.entrypoints.serve import WITHOUT_EFFECT, read_options
from kvllm.entrypoints.settings import parse_request_compression
from kvllm.entrypoints.sizes import parse_bytes, parse_count, parse_gib

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2G", 2 * GIB),
        ("2GiB", 2 * GIB),
        ("2 gib", 2 * GIB),
        ("2GB", 2 * 10**9),
        ("2g", 2 * 10**9),
        ("1.5M", 3 << 19),
        ("64kB", 64000),
        ("64K", 1 << 16),
        ("1T", 1 << 40),
        ("47940000001", 47940000001),
        ("1048576", 1 << 20),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size
    if not text.isdigit():
        assert parse_gib(text) == size / GIB


def test_a_size_in_gib_may_have_no_unit():
    assert [parse_gib(text) for text in ("8", "0.5", "1e-9")] == [8, 0.5, 1e-9]


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (parse_bytes, "24", "24 bytes[?] write 24G, 24M or 24GB"),
        (parse_bytes, "1048575", "1048575 bytes[?]"),
        (parse_bytes, "80 gigs", "'80 gigs' is no size: write 24G"),
        (parse_bytes, "-1G", "'-1G' is no size"),
        (parse_gib, "8589934592", "8589934592 GiB[?] a number without a unit counts GiB"),
        (parse_gib, "nan", "'nan' is no size"),
        (parse_count, "4GB", "'4GB' is no integer"),
        (parse_count, "1.5k", "'1.5k' is no integer"),
    ],
)
def test_wrong_sizes(read, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        read(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--kv-cache-memory-bytes", "24"],
        ["run-batch", "-i", "a", "-o", "b", "--kv-cache-memory-bytes", "24"],
        ["plan", "m", "--gpu-memory", "24"],
    ],
)
def test_a_size_without_a_unit_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2 and "24 bytes? write 24G" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["serve m", "plan m", "simulate --model m --hardware h --workload w --num-blocks 9"]
)
def test_large_numbers_have_a_unit_in_every_command(command: str) -> None:
    args = cli.make_parser().parse_args([*command.split(), "--max-model-len", "4k"])
    assert args.max_model_len == 4000


def test_sizes_reach_the_engine():
    flags = ["--kv-cache-memory-bytes", "2GB", "--kv-offloading-size", "512M", "--kv-offloading-disk-size", "3"]
    engine = engine_args_from(cli.make_parser().parse_args(["serve", *flags, "--max-model-len", "4k"]))
    assert (engine.kv_cache_memory_bytes, engine.max_model_len) == (2 * 10**9, 4000)
    assert (engine.kv_offloading_size, engine.kv_offloading_disk_size) == (0.5, 3)


def test_flags_may_have_underscores():
    flags = ["--max_model_len", "4k", "--block_size=32", "--no_trust_remote_code"]
    given = cli.make_parser().parse_args(["serve", *flags, "--tokenizer", "a_b"])
    assert (given.max_model_len, given.block_size, given.tokenizer) == (4000, 32, "a_b")


@pytest.mark.parametrize("option", CHOICES)
def test_named_choices_are_those_of_the_engine(option):
    beside = {"kv_offload_dtype": {"kv_cache_dtype": "bfloat16"}}
    for name in CHOICES[option]:
        EngineArgs(**{option: name, **beside.get(option, {})})
    with pytest.raises(ConfigError, match=option):
        EngineArgs(**{option: "another"})


def test_flags_of_vllm_that_ask_for_nothing():
    switches = ["--no-trust-remote-code", "--no-enable-lora", "--disable-log-stats", "--no-disable-log-stats"]
    values = ["--pipeline-parallel-size", "1", "--task", "generate", "--tokenizer-mode", "auto", "--cpu-offload-gb=0"]
    objects = ["--compilation-config", "{}", "--limit-mm-per-prompt", "{}", "--dtype", "half"]
    given = cli.make_parser().parse_args(["serve", *switches, *values, *objects, "--served-model-name", "a", "b"])
    assert engine_args_from(given) == EngineArgs(dtype="float16")
    assert given.served_model_name == ["a", "b"]


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"served_model_name"}))
def test_flags_of_vllm_that_are_refused_say_why(name, capsys):
    """No help and no completion names them."""
    neutral, reason = REFUSED[name]
    flag = f"--{name.replace('_', '-')}"
    values = [] if any(value is False for value in neutral) else ["something"]
    for command in ("serve", "run-batch"):
        files = ["-i", "a", "-o", "b"] if command == "run-batch" else []
        given = cli.make_parser().parse_args([command, *files, flag, *values])
        if any(value is True for value in neutral):
            engine_args_from(given)
            continue
        with pytest.raises(ConfigError, match=re.escape(reason)):
            engine_args_from(given)
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    assert f"{flag} " not in capsys.readouterr().out


@pytest.mark.parametrize("switch", WITHOUT_EFFECT)
def test_switches_of_vllms_server_that_change_nothing(switch):
    parse = cli.make_parser().parse_args
    (engine, server), (other, plain) = (read_options(parse(["serve", *flags])) for flags in ([f"--{switch}"], []))
    assert engine == other and replace(server, keys=plain.keys) == plain


BY_LAYER = CompressionConfig(layer_groups=(LayerGroup((0, 1), 1), LayerGroup((2,), 2)))
LIKE_PRESSURE = CompressionConfig(policy=Pressure(window_blocks=24))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pressure", CompressionConfig(policy="pressure")),
        ("pressure,window_blocks=24", LIKE_PRESSURE),
        ("policy=pressure,window_blocks=24", LIKE_PRESSURE),
        ('{"policy": "pressure", "window_blocks": 24}', LIKE_PRESSURE),
        (
            '{"method": "streaming", "method_options": {"sinks": 8}}',
            CompressionConfig(method="streaming", method_options={"sinks": 8}),
        ),
        ('{"layer_groups": [{"layers": [0, 1], "retain_blocks": 1}, {"layers": [2], "retain_blocks": 2}]}', BY_LAYER),
        ("layer_groups=0-1:1/2:2", BY_LAYER),
        ('{"policy": {"name": "pressure", "window_blocks": 24}}', LIKE_PRESSURE),
        ("method=streaming,sinks=8", CompressionConfig(method="streaming", method_options={"sinks": 8})),
        ("layer_groups=auto", CompressionConfig(layer_groups="auto")),
        ("none", None),
        ("", CompressionConfig()),
    ],
)
def test_compression(text, expected):
    assert parse_compression(text) == expected


WRONG_SETTINGS = [
    ("perod=4", "no option 'perod'; did you mean period[?]"),
    ('{"perod": 4}', "no option 'perod'; did you mean period[?]"),
    ("presure", "policy='presure' is not allowed: choose one of periodic, pressure"),
    ("period", "'period' has no value: write name=value, here period=[.]"),
    ("standalone,period=4", "period=4 is not allowed: policy='standalone' has window_blocks, "),
    ("method=keydiff,chunk_budget=4", "chunk_budget=4 is not allowed: .*method='keydiff' has no option"),
    ("window_block", "policy='window_block' is not allowed"),
    ('{"period": "often"}', "'period=often': Expected `int`"),
    ('{"period": 4', "is no JSON object"),
    ("pressure,period=0", "period=0 is not allowed"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_SETTINGS)
def test_wrong_settings_of_compression(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_compression(text)


@pytest.mark.parametrize("command", ["serve", "plan", "simulate"])
@pytest.mark.parametrize("text", ["presure", '{"perod": 4}'])
def test_every_command_refuses_wrong_settings(command, text, tmp_path, capsys):
    workload = tmp_path / "w.json"
    workload.write_text(json.dumps({"num_requests": 1, "input_len": 8, "output_len": 8}))
    more = {"simulate": ["--hardware", "cpu", "--workload", str(workload)]}
    with pytest.raises(SystemExit) as ended:
        cli.main([command, str(EngineArgs().path), *more.get(command, []), "--compression", text])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and ("no option 'perod'; did you mean period?" in err or "policy='presure'" in err)


def test_the_settings_of_a_request():
    for text in ("retain_blocks=4,compress=true", '{"retain_blocks": 4, "compress": true}'):
        assert parse_request_compression(text) == {"retain_blocks": 4, "compress": True}
    for text in ("retain_block=4", '{"retain_block": 4}'):
        with pytest.raises(ConfigError, match="'retain_block=4' is no setting; did you mean retain_blocks[?]"):
            parse_request_compression(text)
