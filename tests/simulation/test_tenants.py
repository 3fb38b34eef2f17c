"""Simulated tenants: their loads, the figures of each, and the command."""

from __future__ import annotations

import json
import math
import random

import msgspec
import pytest

from kvllm.config import EngineConfig
from kvllm.entrypoints import cli
from kvllm.errors import ConfigError
from kvllm.simulation.cost import CostModel
from kvllm.simulation.tenants import Load, TenantLoad, make_load, parse_tenants, serve, without
from tests.simulation.test_simulation import HARDWARE, engine_config, model, model_file

__all__ = ["model", "model_file"]  # fixtures

SPEC = "name=quiet,rate=0.002,input_len=8,output_len=8;name=noisy,rate=0.2,on_seconds=2000,cycle_seconds=9000"
NOISE = ",input_len=16,output_len=64,weight=2,guaranteed_share=0.25"


@pytest.fixture
def cost(model) -> CostModel:
    return CostModel(HARDWARE, model, "float32")


def test_arrivals_are_poisson_while_a_tenant_sends() -> None:
    steady = TenantLoad(name="a", rate=2).arrivals(10_000, random.Random(0))
    assert len(steady) == pytest.approx(20_000, rel=0.03) and steady == sorted(steady)
    bursts = TenantLoad(name="a", rate=2, on_seconds=10, cycle_seconds=100).arrivals(10_000, random.Random(0))
    assert len(bursts) == pytest.approx(2000, rel=0.1) and bursts == sorted(bursts)
    assert max(time % 100 for time in bursts) <= 10


def test_a_tenants_requests_do_not_depend_on_the_others() -> None:
    tenants = parse_tenants(SPEC + NOISE)
    assert (tenants[1].config.weight, tenants[1].config.guaranteed_share) == (2, 0.25)
    both, alone = make_load(tenants, 20_000, 100), make_load(tenants[:1], 20_000, 100)
    assert without(both, "noisy") == alone
    assert both.arrivals == sorted(both.arrivals)


def test_files_and_specs_are_read_alike(tmp_path) -> None:
    tenants = [{"name": "a", "rate": 1.5, "input_len": 7}, {"name": "b", "rate": 2.0}]
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"tenants": tenants}))
    toml = tmp_path / "t.toml"
    toml.write_text('[[tenants]]\nname = "a"\nrate = 1.5\ninput_len = 7\n[[tenants]]\nname = "b"\nrate = 2\n')
    spec = "name=a,rate=1.5,input_len=7; name=b,rate=2"
    assert parse_tenants(str(file)) == parse_tenants(str(toml)) == parse_tenants(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name=a", "missing required field `rate`"),
        ("name=a,rate=often", "Expected `float`"),
        ("name=a,rate=0", "rate=0.0 is not allowed"),
        ("name=a,rate=1,wieght=2", "unknown field `wieght`; fields are"),
        ("name=a,rate=1,weight=0", "weight=0.0 is not allowed"),
        ("name=a,rate=1,on_seconds=5,cycle_seconds=2", "on_seconds=5.0 is not allowed"),
        ("name=a,rate=1;name=a,rate=2", "each name once"),
        ("absent.json", "cannot be read"),
    ],
)
def test_wrong_tenants_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tenants(text)


@pytest.mark.parametrize("duration", [math.inf, math.nan, -1.0])
def test_a_duration_without_an_end_is_refused(duration: float) -> None:
    with pytest.raises(ConfigError, match="duration="):
        make_load(parse_tenants("name=a,rate=1"), duration, 100)


def test_each_tenant_gets_its_figures(cost) -> None:
    load = Load([(8, 4)] * 4, [0.0, 0.0, 0.0, 1e6], ["a", "a", "b", "b"])
    outcome, served = serve(engine_config(), cost, load)
    assert [served[name].requests for name in "ab"] == [2, 2]
    assert [served[name].throughput_share for name in "ab"] == [0.5, 0.5]
    together, alone = outcome.first_tokens[0], outcome.first_tokens[3]
    assert outcome.first_tokens[:3] == [together] * 3 and alone < together
    assert served["a"].first_token == pytest.approx((together, together))
    assert served["b"].first_token[0] == pytest.approx((together + alone) / 2)


def test_a_noisy_tenant_delays_itself_and_not_a_quiet_one(cost) -> None:
    config = EngineConfig(num_blocks=100, max_model_len=240, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    load = make_load(parse_tenants(SPEC + NOISE), 9000, 240)
    (_, alone), (outcome, fair), (fifo, in_order) = (
        serve(config, cost, without(load, "noisy")),
        serve(config, cost, load),
        serve(config, cost, load, in_order=True),
    )
    assert in_order["quiet"].first_token[1] > 50 * alone["quiet"].first_token[1]
    assert fair["quiet"].first_token[1] < 5 * alone["quiet"].first_token[1]
    assert fair["noisy"].preemptions > 0
    assert outcome.output_tokens == fifo.output_tokens
    assert outcome.output_tokens_per_s > 0.95 * fifo.output_tokens_per_s


def test_command_shows_each_tenant(tmp_path, model_file, capsys) -> None:
    hardware = tmp_path / "slow.json"
    hardware.write_text(msgspec.json.encode(HARDWARE).decode())
    arguments = ["--model-config", str(model_file), "--hardware", str(hardware), "--tenants", SPEC + NOISE]
    arguments += ["--duration", "3000", "--without", "noisy", "--block-size", "4", "--num-blocks", "500"]
    cli.main(["simulate", *arguments, "--max-model-len", "200"])
    blocks = capsys.readouterr().out.strip().split("\n\n")
    assert [block.split(":")[0] for block in blocks] == ["Fair", "First come, first served", "Fair, without noisy"]
    assert all("quiet" in block for block in blocks)
    assert ["noisy" in block.split("\n", 1)[1] for block in blocks] == [True, True, False]
    assert "%" in blocks[0].split("quiet")[1]
    with pytest.raises(SystemExit):
        cli.main(["simulate", *arguments, "--without", "loud"])
    assert "one of several tenants: noisy, quiet" in capsys.readouterr().err
