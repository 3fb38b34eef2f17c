"""What a run is made of: an engine's options, requests with their times, and faults. A seed draws all of it."""

from __future__ import annotations

import random
from typing import Any

from msgspec import Struct, field

from kvllm import CompressionConfig, SamplingParams
from kvllm.config import EngineConfig, SpeculativeConfig, TenantConfig
from kvllm.kvcache.groups import UNIFORM, KVGroup
from kvllm.sampling_params import BeamSearchParams
from tests.deterministic.exact_model import VOCAB

WINDOWS: list[list[int | None]] = [[None], [None], [None, 9], [None, 5, 16], [12]]
"""Of the KV groups of a model; None attends all tokens."""

TEXT_ROUTES = ("messages", "responses")
"""Of the server, whose answers have no token ids."""

ADAPTERS = "xyz"
SERVER = ("http", "stream")
"""How requests come that the server answers."""
RECALLING = ("keydiff", "kara")
"""Methods beside which what was dropped may come back."""

KINDS = ("restart", "restart", "interrupt", "interrupt", "row", "clock", "forget", "engine")


RULES: list[dict[str, Any]] = [
    {"regex": "[a-d]{2,9}( [0-9]{1,3}){0,4}"},
    {"choice": ["a quick dog", "a quick brown dog", "the fox"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"]}},
    {"regex": "(["},
]
"""Of structured outputs; the last one cannot be compiled."""


class Arrival(Struct, kw_only=True, omit_defaults=True):
    """A request and what its client does.

    at: seconds after the start. via: how it comes: "generate", "deliver" or "beam" (a search for as many texts as `n`
        says) of AsyncLLM, "http" or "stream" of the server, at `route`; the prompt of a chat is the text of a message.
        pause: seconds that the client takes for each item.
    abort_at, leave_at: seconds after `at` at which it is aborted by its id, or its client goes away. raises_at: the
        number of the item that its client's callback fails at.
    """

    at: float
    prompt: list[int]
    sampling: dict[str, Any]
    via: str = "generate"
    route: str = "completions"
    priority: int = 0
    tenant: str = ""
    salt: str | None = None
    adapter: str = ""
    pause: float = 0.0
    abort_at: float | None = None
    leave_at: float | None = None
    raises_at: int | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.sampling)

    @property
    def beams(self) -> BeamSearchParams:
        options = {key: self.sampling[key] for key in ("max_tokens", "ignore_eos")}
        return BeamSearchParams(beam_width=self.sampling["n"], **options)


class Fault(Struct, kw_only=True, omit_defaults=True):
    """kind: "restart" (the workers are lost before or after a step), "interrupt" (a step is cut short), "row" (one
    sequence cannot be sampled), "engine" (a step raises, and the engine is dead), "clock" (it jumps), "replica" (one is
    lost), "forget" (the prefix cache is reset), "text" (tokens cannot be decoded), "drain" (the server takes no
        more), "load" (another adapter of a name) and "unload".

    step: of the workers, or, for an interrupt of several replicas, of looks for their reports; for "text", of calls; to
        "load" and "unload" it says which adapter.
        executed: whether it strikes after the step's work. at: seconds, for the others.
    """

    kind: str
    step: int = 0
    at: float = 0.0
    executed: bool = False


class Scenario(Struct, kw_only=True, omit_defaults=True):
    """options: of the engine, see `make_config`. has_text: whether there is a tokenizer. supervised: whether an engine
    that has died is replaced. loss: the share of blocks that are lost on the host or the disk."""

    seed: int
    options: dict[str, Any]
    arrivals: list[Arrival]
    faults: list[Fault] = field(default_factory=list)
    replicas: int = 1
    has_text: bool = False
    supervised: bool = False
    loss: float = 0.0


def make_config(options: dict[str, Any]) -> EngineConfig:
    """The configuration of plain options: `windows`, `compression`, `speculation` and `tenants` stand for objects."""
    plain = dict(options)
    windows = plain.pop("windows", [None])
    plain["has_recurrent_layers"] = "num_state_snapshots" in plain
    compression, speculation = plain.pop("compression", None), plain.pop("speculation", None)
    tenants = plain.pop("tenants", {})
    groups = UNIFORM if windows == [None] else tuple(KVGroup(window, ((i,),)) for i, window in enumerate(windows))
    return EngineConfig(
        **plain,
        tenants={name: TenantConfig(**each) for name, each in tenants.items()},
        kv_groups=groups,
        compression=compression and CompressionConfig(**compression),
        speculation=speculation and SpeculativeConfig(**speculation),
    )


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    options = draw_options(rng)
    text = rng.random() < 0.3
    replicas = rng.choice([1, 1, 1, 2, 3])
    scenario = Scenario(
        seed=seed,
        options=options,
        arrivals=draw_arrivals(rng, options, text, replicas),
        faults=draw_faults(rng, replicas),
        replicas=replicas,
        has_text=text,
        loss=rng.choice([0.0, 0.0, 0.1, 0.5]),
    )
    scenario.faults += draw_faults_of_text(rng, text, "max_loras" in options)
    if text and rng.random() < 0.6:
        scenario.supervised = True
        deaths = rng.choice([0, 1, 1, 2, 5])
        scenario.faults += [Fault(kind="engine", step=rng.randint(1, 150)) for _ in range(deaths)]
    for arrival in scenario.arrivals:
        if arrival.via in SERVER:
            draw_route(rng, arrival)
        elif "compression" not in options and rng.random() < 0.1:
            kept = {key: arrival.sampling[key] for key in ("n", "ignore_eos")}
            arrival.via, arrival.raises_at = "beam", None
            arrival.sampling = {**kept, "max_tokens": rng.randint(1, 12)}
    return scenario


def draw_route(rng: random.Random, arrival: Arrival) -> None:
    """Let a request go to one of the server's routes. Those without token ids take fewer options."""
    arrival.route = rng.choice(["completions", "chat", *TEXT_ROUTES])
    if arrival.route in TEXT_ROUTES:
        arrival.sampling = {"temperature": 0.0, "max_tokens": arrival.sampling["max_tokens"]}


def draw_options(rng: random.Random) -> dict[str, Any]:
    block_size = rng.choice([1, 2, 4, 4, 8])
    windows = rng.choice(WINDOWS)
    max_num_seqs = rng.randint(1, 8)
    options: dict[str, Any] = {
        "num_blocks": rng.randint(8, 64) * (4 // block_size or 1) * len(windows),
        "block_size": block_size,
        "max_model_len": rng.choice([64, 128]),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": rng.randint(max_num_seqs, 32),
        "enable_prefix_caching": rng.random() < 0.7,
        "watermark": rng.choice([0.0, 0.01, 0.2]),
        "async_scheduling": rng.random() < 0.6,
        "windows": windows,
        "swap": rng.choice(["always", "always", "auto"]),
    }
    if rng.random() < 0.5:
        options["num_host_blocks"] = rng.choice([8, 200])
        if rng.random() < 0.4:
            options["kv_offloading_path"] = "disk"
    if rng.random() < 0.3:
        options["tenants"] = {"a": {"weight": rng.choice([0.5, 4.0])}, "b": {"guaranteed_share": 0.3}}
    if is_recurrent := rng.random() < 0.25:
        options["num_state_snapshots"] = rng.choice([1, 4, 40])
    if windows[0] is None and rng.random() < 0.6:
        options["compression"] = draw_compression(rng, block_size, slides=len(windows) > 1 or is_recurrent)
    if rng.random() < 0.3:
        options["max_loras"] = rng.randint(1, 2)
    if rng.random() < 0.25:
        drafts: list[dict[str, Any]] = [
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2},
            {"method": "suffix", "num_speculative_tokens": 6},
            {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3},
        ]
        options["speculation"] = rng.choice(drafts)
    elif windows == [None] and options.get("compression", {}).get("method") in RECALLING and rng.random() < 0.5:
        options["compression"] |= rng.choice([{"recall_period": rng.randint(1, 5)}, {"recall_bound": 0.1}])
    return options


def draw_compression(rng: random.Random, block_size: int, slides: bool) -> dict[str, Any]:
    policy = rng.choice(["pressure", "periodic", "threshold"] + ["standalone"] * (block_size == 1))
    if policy == "threshold":
        threshold = rng.randint(12, 40)
        budget = rng.randint(4, threshold)
        method = rng.choice(["keydiff", "sliding_window"] + ["mean_attention"] * (not slides))
        protect = method == "mean_attention"
        return {
            "method": method,
            "policy": policy,
            "protect_prompt": protect,
            "threshold_tokens": threshold + 40 * protect,
            "budget_tokens": budget + 40 * protect,
            "buffer": rng.randint(0, budget),
        }
    blocks = rng.randint(2, 4) * (4 if block_size == 1 else 1)
    window = blocks * block_size
    retain = rng.randint(1, window)
    prompt = rng.random() < 0.3
    methods = ["keydiff" if slides else "kara", "sliding_window"]
    if policy != "standalone" and not prompt:
        methods.append("mean_attention")
    clock = {"period": rng.randint(1, 6), "max_sequences": rng.randint(1, 3)}
    return {
        "method": rng.choice(methods),
        "policy": policy,
        "window_blocks": blocks,
        "retain_tokens": retain,
        "buffer": rng.randint(0, min(retain, window - 1)),
        "compress_prompt": prompt,
        **({} if policy == "standalone" else clock),
    }


def draw_arrivals(rng: random.Random, options: dict[str, Any], text: bool, replicas: int) -> list[Arrival]:
    """Requests of few different tokens, so that prompts begin alike; some repeat an earlier prompt and go on."""
    arrivals: list[Arrival] = []
    now, longest = 0.0, options["max_model_len"]
    for _ in range(rng.randint(4, 24)):
        now += rng.choice([0.0, 0.0, 0.01, 0.1, 0.5]) * rng.random()
        prompt = [rng.randint(3, 4) for _ in range(rng.randint(1, longest // 3))]
        if arrivals and rng.random() < 0.4:
            prompt = (rng.choice(arrivals).prompt + prompt)[: longest // 2]
        arrivals.append(draw_arrival(rng, options, now, prompt, text))
    return arrivals


def draw_arrival(rng: random.Random, options: dict[str, Any], at: float, prompt: list[int], text: bool) -> Arrival:
    sampling: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.0, 1.0]),
        "seed": rng.randint(0, 5),
        "max_tokens": rng.choice([1, rng.randint(1, 60), rng.randint(1, 60)]),
        "ignore_eos": rng.random() < 0.7,
        "n": min(rng.choice([1, 1, 1, 2, 3]), options["max_num_seqs"]),
    }
    if rng.random() < 0.15:
        sampling["prompt_logprobs"] = rng.randint(0, 2)
        sampling["max_tokens"] = rng.choice([0, *[sampling["max_tokens"]] * 4])
    if rng.random() < 0.15:
        sampling["stop_token_ids"] = [rng.randrange(VOCAB)]
        sampling["min_tokens"] = rng.choice([0, min(4, sampling["max_tokens"])])
    if rng.random() < 0.15:
        sampling["logprobs"] = rng.randint(0, 2)
    if text and rng.random() < 0.3:
        sampling["structured_outputs"] = rng.choice(RULES)
    if text and rng.random() < 0.2:
        sampling["stop"] = [rng.choice(['"#', "%", "&'"])]
    if "compression" in options and rng.random() < 0.2:
        sampling["compress"] = False
    via = ["generate", "deliver"]
    adapter = rng.choice(["", *ADAPTERS]) if "max_loras" in options else ""
    if text and not sampling.keys() & {"stop", "compress", "prompt_logprobs"}:
        via += SERVER
    chosen = rng.choice(via)
    return Arrival(
        at=at,
        prompt=prompt,
        sampling=sampling,
        via=chosen,
        priority=rng.choice([0, 0, 0, 1, -1]),
        tenant=rng.choice(["", "", "a", "b"]) if "tenants" in options else "",
        salt=rng.choice([None, None, None, "x"]),
        adapter=adapter,
        pause=rng.choice([0.0, 0.0, 0.02, 0.3]),
        abort_at=rng.random() * 2 if chosen == "generate" and rng.random() < 0.1 else None,
        leave_at=rng.random() * 2 if rng.random() < 0.1 else None,
        raises_at=rng.randint(1, 4) if chosen == "deliver" and rng.random() < 0.1 else None,
    )


def draw_faults(rng: random.Random, replicas: int) -> list[Fault]:
    faults: list[Fault] = []
    for _ in range(rng.choice([0, 0, 1, 2, 4])):
        kind = rng.choice([*KINDS, *["replica"] * 3 * (replicas > 1)])
        if kind == "engine" and rng.random() < 0.7:
            kind = "row"
        faults.append(Fault(kind=kind, step=rng.randint(1, 150), at=rng.random() * 4, executed=rng.random() < 0.5))
    return faults


def draw_faults_of_text(rng: random.Random, text: bool, loras: bool) -> list[Fault]:
    found = [Fault(kind="text", step=rng.randint(1, 200)) for _ in range(rng.choice([0, 0, 1, 2]))]
    found += [Fault(kind="drain", at=rng.random() * 4)] if rng.random() < 0.2 else []
    changes = ["load", "unload"] if loras else []
    found += [Fault(kind=kind, at=rng.random() * 2, step=rng.randrange(1, 100)) for kind in changes for _ in range(3)]
    return found if text else []
