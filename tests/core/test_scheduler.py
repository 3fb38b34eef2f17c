"""The scheduler and the block manager: invariants under any order of events, and the promises made in the design."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvllm.compression.queries import window_tokens
from kvllm.config import CompressionConfig, EngineConfig, LayerGroup, SpeculativeConfig, TenantConfig
from kvllm.core import admission, state_snapshots
from kvllm.core.policies import Threshold, WindowOptions
from kvllm.core.scheduler import Scheduler
from kvllm.core.sequence import Sequence, ServiceClass
from kvllm.errors import RequestError
from kvllm.kvcache.groups import UNIFORM, KVGroup, full_groups, has_full, make_groups
from kvllm.sampling_params import SamplingParams
from kvllm.stats import EngineStats
from tests.helpers.compressions import paper_compression
from tests.helpers.examples import examples
from tests.helpers.literal_worker import LiteralWorker
from tests.helpers.plans import scheduled_in

GREEDY = SamplingParams(temperature=0)
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=2)
SUFFIX = SpeculativeConfig(method="suffix", num_speculative_tokens=9)
MODEL = SpeculativeConfig(method="draft_model", model="a", num_speculative_tokens=4)


class Harness:
    """A scheduler with a literal worker, driven the way the engine drives it."""

    def __init__(self, config: EngineConfig, loss: float = 0.0) -> None:
        self.config = config
        with patch.object(state_snapshots, "DISTANCE", 8):  # texts are short
            self.scheduler = Scheduler(config, EngineStats(num_blocks=config.num_blocks))
        self.worker = LiteralWorker(config, loss=loss)
        self.live: dict[int, Sequence] = {}
        self.all: list[Sequence] = []
        self.finished: dict[int, list[int]] = {}
        self.ends: dict[int, int] = {}  # tokens at which sequences end before their `max_length`
        self.next_id = 0
        self.plans = []

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int = 1,
        sampling: SamplingParams = GREEDY,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> int:
        compression = self.config.compression
        seq = Sequence(
            self.next_id,
            str(self.next_id),
            list(prompt),
            sampling,
            max_length=len(prompt) + max_tokens,
            forks=n - 1,
            tail_start=0 if compression and compression.compress_prompt else None,
            service_class=ServiceClass(priority, tenant),
        )
        if self.scheduler.planner:
            self.scheduler.planner.policy.check(len(prompt), sampling)
        self.scheduler.longest_of(seq)  # which refuses what can never fit
        self.scheduler.add(seq)
        self.live[seq.seq_id] = seq
        self.all.append(seq)
        self.next_id += n
        return seq.seq_id

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        assert self.scheduler.blocks.num_owned <= self.config.num_blocks
        for seq, _ in self.scheduler.update(plan, self.worker.execute(plan)):
            if not seq.has_left and seq.seq_id not in self.live:
                self.live[seq.seq_id] = seq
                self.all.append(seq)
            if seq.num_tokens >= self.ends.get(seq.seq_id, seq.max_length) and seq.seq_id in self.live:
                self.finish(seq.seq_id)
        for seq in self.scheduler.running:
            self.worker.check_agrees(seq)

    def fail(self, executed: bool) -> None:
        plan = self.scheduler.schedule()
        if executed:
            self.worker.execute(plan)
        self.live = {seq_id: self._again(seq) for seq_id, seq in self.live.items()}
        self.scheduler.reset(list(self.live.values()))

    def _again(self, seq: Sequence) -> Sequence:
        """A sequence with the same tokens, and nothing in the cache."""
        prompt, output = seq.token_ids[: seq.prompt_length], seq.token_ids[seq.prompt_length :]
        fresh = Sequence(
            seq.seq_id,
            seq.request_id,
            prompt,
            seq.sampling,
            max_length=seq.max_length,
            index=seq.index,
            forks=seq.forks_pending,
            tail_start=seq.tail_start,
            service_class=seq.service_class,
        )
        fresh.extend(output)
        self.all.append(fresh)
        return fresh

    def finish(self, seq_id: int) -> None:
        seq = self.live.pop(seq_id)
        self.finished[seq_id] = seq.token_ids[:]
        self.scheduler.finish(seq)

    def check_counts(self) -> None:
        """What sequences count is what the engine counts: compressions of plans, and hits of sequences that are new."""
        stats = self.scheduler.stats
        assert sum(seq.windows_compressed for seq in self.all) == stats.windows_compressed
        assert sum(seq.evicted for seq in self.all) == stats.entries_evicted
        assert sum(seq.preemptions for seq in self.all) == stats.preemptions
        assert stats.prefix_host_hits <= stats.prefix_cache_hits <= stats.prefix_cache_queries <= stats.prompt_tokens

    def run(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_unfinished:
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps")


def engine_config(num_blocks: int, **options) -> EngineConfig:
    defaults = {"block_size": 4, "max_model_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return EngineConfig(num_blocks=num_blocks, **(defaults | options))


@pytest.mark.parametrize("window_blocks", [None, 2])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_admission_leaves_room_for_what_ended_sequences_let_it_expect(window_blocks, share) -> None:
    compression = window_blocks and CompressionConfig(
        method="kara", policy="pressure", window_blocks=window_blocks, buffer=1
    )

    def preemptions(reserve: float) -> int:
        harness = Harness(engine_config(60, watermark=0.0, max_num_seqs=20, compression=compression))
        for i in range(100):
            tokens = 20 + 13 * i % 40
            seq_id = harness.add([0, 1, 1, 0], int(tokens / share))
            harness.ends[seq_id] = 4 + tokens
        with patch.object(admission, "RESERVE", reserve):
            harness.run()
        return harness.scheduler.stats.preemptions

    assert preemptions(0.25) < preemptions(0.0) / 2


def retaining_groups(window_blocks: int) -> st.SearchStrategy[tuple[KVGroup, ...]]:
    """Groups of layers that keep different numbers of blocks of a window, one of them perhaps all; perhaps beside one
    with a sliding window."""
    retained = st.sets(st.integers(1, window_blocks), min_size=2, max_size=3).map(sorted)
    windows = st.one_of(st.none(), st.none(), st.integers(1, 20))
    return st.builds(
        lambda kept, window: make_groups(
            [None] * (1 + len(kept)) + [window] * bool(window), [kept[0], *kept] + [None] * bool(window)
        ),
        retained,
        windows,
    )


def kv_groups() -> st.SearchStrategy[tuple[KVGroup, ...]]:
    """One, two or three groups, the first of them in one part."""
    window = st.integers(1, 20)
    sliding = st.builds(KVGroup, window, st.sampled_from([((0,),), ((0,), (1,))]))
    first = st.builds(KVGroup, st.one_of(st.none(), st.none(), window))
    return st.one_of(st.just(UNIFORM), st.tuples(first), st.tuples(first, sliding), st.tuples(first, sliding, sliding))


@st.composite
def configs(draw) -> EngineConfig:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    compression = None
    groups = draw(kv_groups())
    recurrent = draw(st.booleans())
    slides = recurrent or any(group.window is not None for group in groups)
    kinds = ["none", "windows", "windows", "threshold"] if has_full(groups) else ["none"]
    kind = draw(st.sampled_from(kinds))
    if kind == "threshold":
        threshold = draw(st.integers(2, 40))
        budget = draw(st.integers(1, threshold))
        method = draw(st.sampled_from(["keydiff", "sliding_window"] + ["mean_attention"] * (not slides)))
        compression = CompressionConfig(
            method=method,
            policy="threshold",
            protect_prompt=method == "mean_attention",
            threshold_tokens=threshold,
            budget_tokens=budget,
            buffer=draw(st.integers(0, budget)),
        )
    elif kind == "windows":
        policy = draw(st.sampled_from(["periodic", "pressure"] + ["standalone"] * (block_size == 1)))
        window_blocks = draw(st.integers(2, 4)) * (4 if block_size == 1 else 1)
        window = window_blocks * block_size
        retain = draw(st.integers(1, window))
        kept = {"retain_tokens": retain}
        if draw(st.booleans()):
            groups = draw(retaining_groups(window_blocks))
            slides = recurrent or groups[-1].window is not None
            layer_groups = [LayerGroup(sum(group.parts, ()), group.retain_blocks) for group in full_groups(groups)]
            kept, retain = {"layer_groups": layer_groups}, groups[0].retain_blocks * block_size
        buffer = draw(st.integers(0, min(retain, window - 1)))
        compress_prompt = draw(st.booleans())
        methods = ["keydiff" if slides else "kara", "sliding_window"]
        if policy != "standalone" and not compress_prompt:
            methods.append("mean_attention")
        method = draw(st.sampled_from(methods))
        clock = {"period": draw(st.integers(1, 6)), "max_sequences": draw(st.integers(1, 3))}
        compression = CompressionConfig(
            method=method,
            policy=policy,
            **({} if policy == "standalone" else clock),
            window_blocks=window_blocks,
            buffer=buffer,
            compress_prompt=compress_prompt,
            **kept,
        )
    max_num_seqs = draw(st.integers(1, 6))
    watermark = draw(st.sampled_from([0.0, 0.01, 0.2]))
    return EngineConfig(
        num_blocks=draw(st.integers(4, 48)),
        block_size=block_size,
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 24)),
        enable_prefix_caching=draw(st.booleans()),
        watermark=watermark,
        compression=compression,
        tenants=draw(tenants()),
        kv_groups=groups,
        num_host_blocks=draw(st.sampled_from([0, 0, 8, 200])),
        swap=draw(st.sampled_from(["always", "always", "auto"])),
        kv_offloading_path=draw(st.sampled_from([None, "disk"])),
        has_recurrent_layers=recurrent,
        num_state_snapshots=draw(st.integers(0, 4)) if recurrent else 0,
        speculation=draw(st.sampled_from([None, None, NGRAM, SUFFIX, MODEL])),
    )


def tenants() -> st.SearchStrategy[dict[str, TenantConfig]]:
    return st.dictionaries(
        st.sampled_from(["a", "b"]),
        st.builds(
            TenantConfig,
            weight=st.sampled_from([0.5, 1.0, 4.0]),
            guaranteed_share=st.sampled_from([0.0, 0.2, 0.5]),
            max_priority=st.sampled_from([None, 0, 2]),
            cached_share=st.sampled_from([0.0, 0.1, 1.0]),
        ),
    )


def own_compression(config: EngineConfig) -> st.SearchStrategy[SamplingParams]:
    """Most requests have the engine's compression, some none, some keep other shares of their windows."""
    choices = [{}, {}, {"compress": False}]
    if config.compression and isinstance(config.compression.policy, WindowOptions):
        least = max(1, -(-config.compression.buffer // config.block_size))
        choices += [{"retain_blocks": count} for count in range(least, config.compression.policy.window_blocks + 1)]
    return st.sampled_from(choices).map(lambda options: SamplingParams(temperature=0, **options))


class SchedulerMachine(RuleBasedStateMachine):
    """Add, step, fork, compress, preempt, swap, abort and finish in any order; every step is executed literally, and
    some of what goes to the host gets lost."""

    @initialize(config=configs(), loss=st.sampled_from([0.0, 0.1, 0.5]))
    def start(self, config: EngineConfig, loss: float) -> None:
        self.harness = Harness(config, loss)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 48),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        tenant=st.sampled_from(["a", "b", "c"]),
        priority=st.sampled_from([0, 0, 1, -3]),
        data=st.data(),
    )
    def add(self, prompt: list[int], max_tokens: int, n: int, tenant: str, priority: int, data) -> None:
        n = min(n, self.harness.config.max_num_seqs)
        sampling = data.draw(own_compression(self.harness.config))
        try:
            self.harness.add(prompt, max_tokens, n, sampling, tenant=tenant, priority=priority)
        except RequestError:
            compression = self.harness.config.compression
            if compression and isinstance(compression.policy, Threshold) and compression.policy.protect_prompt:
                return
            config, length = self.harness.config, len(prompt) + max_tokens - 1
            most = [
                group.most_blocks(length, config.block_size, config.max_num_batched_tokens)
                for group in config.kv_groups
            ]
            assert sum(most) > config.num_blocks

    @precondition(lambda self: self.harness.finished)
    @rule(data=st.data(), max_tokens=st.integers(1, 8))
    def add_what_was_generated(self, data, max_tokens: int) -> None:
        """A later turn: the prompt is an earlier prompt and its output, whose blocks may be cached."""
        earlier = self.harness.finished[data.draw(st.sampled_from(sorted(self.harness.finished)))]
        self.add(earlier[: data.draw(st.integers(1, len(earlier)))], max_tokens, 1, "a", 0, data)

    @precondition(lambda self: self.harness.scheduler.has_unfinished)
    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.harness.scheduler.has_unfinished:
                self.harness.step()

    @precondition(lambda self: self.harness.scheduler.has_unfinished)
    @rule(executed=st.booleans())
    def fail(self, executed: bool) -> None:
        """A step that raises, before or after its work."""
        self.harness.fail(executed)

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.harness.finish(data.draw(st.sampled_from(sorted(self.harness.live))))

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run()
            self.harness.step()  # the workers are told of the last ones that ended
            assert self.harness.scheduler.blocks.num_owned == 0
            self.harness.check_counts()
            assert not self.harness.worker.sequences
            assert not self.harness.worker.host.first_scored and not self.harness.worker.host.loads


SchedulerMachine.TestCase.settings = settings(
    max_examples=examples(2000), stateful_step_count=20, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_a_lone_sequence_longer_than_the_pool_finishes_by_compression() -> None:
    compression = paper_compression(method="kara", period=10**6, window_blocks=3, retain_blocks=1, buffer=1)
    harness = Harness(engine_config(20, compression=compression))
    seq_id = harness.add([1] * 10, 150)  # 40 blocks without compression
    harness.run()
    assert len(harness.finished[seq_id]) == 160
    assert harness.scheduler.stats.peak_blocks <= 20


def test_a_resumed_sequence_that_fits_only_compressed_is_compressed_on_the_way_in() -> None:
    compression = paper_compression(method="kara", period=10**6, window_blocks=3, retain_blocks=1, buffer=1)
    harness = Harness(engine_config(24, compression=compression, max_num_seqs=2))
    for _ in range(2):
        harness.add([1] * 10, 150)
    harness.run()
    stats = harness.scheduler.stats
    assert stats.preemptions > 0 and stats.windows_compressed > 0
    assert [len(tokens) for tokens in harness.finished.values()] == [160, 160]


def test_completions_that_share_a_compressible_prompt_finish_in_a_tight_pool() -> None:
    """While siblings share the prompt it cannot be compressed in place; the one that is left alone has to."""
    compression = paper_compression(method="kara", window_blocks=2, retain_blocks=1, buffer=8, compress_prompt=True)
    harness = Harness(engine_config(9, block_size=16, max_num_batched_tokens=32, compression=compression))
    harness.add([0, 1] * 50 + [0], 159, n=2)
    harness.run(limit=2000)
    assert [len(tokens) for tokens in harness.finished.values()] == [260, 260]


@pytest.mark.parametrize("retain_tokens", [3, 2])
def test_the_windows_of_a_prompt_move_together_though_they_are_chosen_from_in_turn(retain_tokens: int) -> None:
    """Of 3 KV pairs one by one, the later windows would begin inside of blocks, and the sequence would need a seventh
    block. And queries of the later windows would find less in front of them than they do in one step."""
    compression = paper_compression(
        method="kara", window_blocks=3, retain_tokens=retain_tokens, buffer=0, compress_prompt=True
    )
    harness = Harness(engine_config(6, block_size=2, max_num_batched_tokens=5, max_num_seqs=2, compression=compression))
    seq_id = harness.add([0, 1] * 6, 9)
    harness.run(limit=2000)
    assert len(harness.finished[seq_id]) == 21
    (first, *_) = [job for plan in harness.plans for job in plan.choices]
    (prompt, *_) = [job for plan in harness.plans for job in plan.compressions]
    assert (first.num_windows, first.num_choices, first.moves) == (1, 1, False)
    assert (prompt.num_windows, prompt.num_choices, prompt.seq_id) == (2, 1, first.seq_id)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    harness = Harness(engine_config(10))
    with pytest.raises(RequestError, match=r"prompt of 30 tokens.*needs 13 KV blocks of 4 tokens, the pool has 10"):
        harness.add([0] * 30, 20)
    harness.add([0] * 30, 11)  # exactly the pool: the last token is never stored
    harness.run()


def test_preemption_takes_the_youngest_and_the_oldest_is_never_preempted() -> None:
    harness = Harness(engine_config(24, watermark=0.0))
    for _ in range(6):
        harness.add([0, 1, 1, 0], 40)
    oldest = harness.live[0]
    harness.run()
    assert harness.scheduler.stats.preemptions > 0
    assert oldest.preemptions == 0


@pytest.mark.parametrize("slowness", [0.0, 0.95])
def test_swapped_sequences_go_on_where_they_were(slowness: float) -> None:
    """Nothing is computed again. Where loads take long, some are cancelled for the blocks that they hold."""

    def run(num_blocks: int) -> Harness:
        harness = Harness(engine_config(num_blocks, watermark=0.0, num_host_blocks=200, swap="always"))
        harness.worker.host.slowness = slowness
        for i in range(8):
            harness.add([i % 2, 1, 0, i % 3], 40)
        harness.run()
        return harness

    harness = run(24)
    assert harness.finished == run(400).finished
    plans, stats = harness.plans, harness.scheduler.stats
    assert stats.swapped_out == stats.preemptions > 0 == stats.tokens_recomputed
    assert sum(item.num_tokens for plan in plans for item in scheduled_in(plan)) == 8 * 43
    assert any(plan.cancelled for plan in plans) == (slowness > 0)


@pytest.mark.parametrize("swap", ["always", "never"])
def test_tenants_do_not_take_turns_without_advancing(swap: str) -> None:
    """A sequence that came back makes way for another tenant only when it has grown by a part of what it was."""
    options = {"num_host_blocks": 200, "swap": swap, "watermark": 0.0, "enable_prefix_caching": False}
    harness = Harness(engine_config(8, max_num_seqs=4, max_num_batched_tokens=8, **options))
    harness.add([1] * 5, 27, tenant="a")
    harness.add([1] * 2, 28, tenant="b")
    harness.run(limit=200)
    assert 0 < harness.scheduler.stats.preemptions < 10


def test_a_compression_of_a_sequence_that_makes_way_in_the_same_step_does_not_count() -> None:
    compression = CompressionConfig(method="keydiff", policy="pressure", period=4, window_blocks=2, buffer=0)
    harness = Harness(engine_config(7, watermark=0.0, enable_prefix_caching=False, compression=compression))
    for token in range(2):
        harness.add([token] * 4, 16)
    harness.run()
    assert harness.scheduler.stats.preemptions > 0 < harness.scheduler.stats.windows_compressed
    harness.check_counts()


def test_what_a_preempted_sequence_finds_on_the_host_is_no_hit_of_a_prompt() -> None:
    harness = Harness(engine_config(6, watermark=0.0, num_host_blocks=50, swap="never"))
    harness.add([0] * 10, 11)
    harness.add([1] * 6, 5)
    harness.run()
    assert harness.scheduler.stats.preemptions > 0 < harness.scheduler.stats.blocks_loaded
    harness.check_counts()


def test_a_sequence_that_comes_back_may_be_compressed_at_once() -> None:
    """In all tables of its layers: workers have them before they compress."""
    compression = CompressionConfig(
        method="kara",
        policy="pressure",
        period=1,
        window_blocks=2,
        retain_blocks=1,
        buffer=0,
        max_sequences=2,
        compress_prompt=True,
    )
    groups = tuple(KVGroup(None, ((layer,),), retain) for layer, retain in enumerate((1, 1, 2)))
    options = {
        "kv_groups": groups,
        "compression": compression,
        "num_host_blocks": 200,
        "swap": "always",
        "tenants": {"a": TenantConfig(weight=0.5)},
    }
    harness = Harness(
        engine_config(
            42, watermark=0.0, enable_prefix_caching=False, max_num_seqs=4, max_num_batched_tokens=9, **options
        )
    )
    harness.add([0], 29, tenant="a")
    harness.add([0] * 4, 1, tenant="a")
    harness.add([0], 37, n=3, tenant="a")
    with patch.object(admission, "RESERVE", 0.0):  # or the last one would wait for longer than it takes to come back
        harness.run()
    compressed = [{job.seq_id for job in plan.compressions} for plan in harness.plans]
    started = [{start.seq_id for start in plan.new_seqs} for plan in harness.plans]
    assert any(jobs & sequences for jobs, sequences in zip(compressed, started, strict=True))


def test_a_compression_right_behind_a_fork_leaves_shared_windows_to_be_copied() -> None:
    compression = CompressionConfig(method="keydiff", policy="threshold", threshold_tokens=5, budget_tokens=3, buffer=0)
    groups = (KVGroup(None, ((0,),)), KVGroup(4, ((1,),)))
    harness = Harness(engine_config(20, block_size=8, compression=compression, kv_groups=groups))
    harness.add([1, 0, 0, 0, 1], 14, n=2)
    harness.run()  # in which the worker compares what each window holds with the text
    assert any(plan.compressions and plan.copies for plan in harness.plans)


def test_the_same_requests_give_the_same_plans() -> None:
    def plans():
        compression = paper_compression(method="kara", period=4, window_blocks=2, buffer=1, max_sequences=2)
        harness = Harness(engine_config(30, compression=compression))
        for i in range(12):
            harness.add([i % 2, 1, 0] * (1 + i % 5), 30 + i)
        harness.run()
        return harness.plans

    assert plans() == plans()


def test_every_eligible_sequence_is_compressed_eventually() -> None:
    compression = paper_compression(method="kara", period=3, max_sequences=1, window_blocks=2, buffer=1)
    harness = Harness(engine_config(400, compression=compression))
    sequences = [harness.live[harness.add([i], 200)] for i in range(8)]
    harness.run()
    assert all(seq.evicted > 0 for seq in sequences)


BUDGETED = {
    "periodic": (
        4,
        paper_compression(method="kara", period=20, max_sequences=6, window_blocks=4, retain_blocks=1, buffer=1),
    ),
    "prompts": (
        4,
        paper_compression(method="kara", period=1000, window_blocks=4, retain_blocks=1, buffer=1, compress_prompt=True),
    ),
    "standalone": (
        1,
        CompressionConfig(method="kara", policy="standalone", window_blocks=16, retain_tokens=8, buffer=2),
    ),
    "threshold": (
        4,
        CompressionConfig(
            method="snapkv", policy="threshold", threshold_tokens=60, budget_tokens=30, buffer=2, query_window=16
        ),
    ),
}


@pytest.mark.parametrize("name", BUDGETED)
def test_compression_takes_no_more_tokens_than_decodes_leave(name: str) -> None:
    """So no event keeps all sequences waiting for more than a step's worth of tokens: others decode meanwhile."""
    block_size, compression = BUDGETED[name]
    config = engine_config(1000, block_size=block_size, max_num_batched_tokens=40, compression=compression)
    harness = Harness(config)
    for i in range(6):
        harness.add([0, 1] * (50 if name == "prompts" else 5), 60 + i)
    harness.run()
    planned = [(plan, [*plan.choices, *plan.compressions]) for plan in harness.plans]
    events = [(plan, jobs) for plan, jobs in planned if jobs]
    windows = [sum(job.num_choices for job in jobs) for _, jobs in events]
    assert max(windows) == 2 and sum(windows) >= 6
    for plan, jobs in events:
        tokens = sum(window_tokens(compression, job.parts[0].size) * job.num_choices for job in jobs)
        assert tokens + plan.num_tokens <= 40
    if name != "periodic":  # whose sequences go on until it is their turn
        assert any(0 < plan.num_seqs < 6 for plan, _ in events)


def test_the_clock_counts_decode_steps_only() -> None:
    compression = paper_compression(method="kara", period=5, window_blocks=2, buffer=1)
    harness = Harness(engine_config(100, compression=compression, max_num_batched_tokens=8))
    harness.add([0, 1] * 20, 30)  # five prefill steps
    events = []
    while harness.scheduler.has_unfinished:
        harness.step()
        if harness.plans[-1].compressions:
            events.append(len(harness.plans) - 5)  # compressed before this step, after as many decodes less one
    assert events == [11, 21]  # after decodes 10 and 20; after 15 its tail is shorter than a window


def test_retention_of_everything_is_no_compression() -> None:
    def plans(compression):
        harness = Harness(engine_config(30, compression=compression))
        for i in range(4):
            harness.add([i % 2] * 9, 60)
        harness.run()
        return harness.plans

    everything = paper_compression(method="kara", period=2, window_blocks=2, retain_blocks=2, buffer=1)
    assert plans(everything) == plans(None)


def test_completions_of_one_prompt_share_its_blocks() -> None:
    harness = Harness(engine_config(100, enable_prefix_caching=False))
    harness.add([0, 1, 0, 1, 0, 1], 4, n=3)
    harness.step()
    assert len(harness.scheduler.running) == 3
    assert harness.scheduler.blocks.num_owned == 2
    harness.step()
    assert harness.scheduler.blocks.num_owned == 4  # the partial second block was copied twice
    assert len(harness.plans[-1].copies) == 2
    harness.run()
    assert len(harness.finished) == 3


def test_a_prefix_hit_shares_blocks_and_computes_the_last_token() -> None:
    harness = Harness(engine_config(100))
    prompt = [0, 1, 1, 0, 1, 0, 0, 1]
    harness.add(prompt, 2)
    harness.run()
    harness.add(prompt, 2)
    harness.step()
    (start,) = harness.plans[-1].new_seqs
    assert start.logical_length == 4  # of two full blocks, the second holds the last token
    harness.run()


def test_generated_blocks_are_found_again() -> None:
    harness = Harness(engine_config(100))
    first = harness.add([0, 1, 1], 10)
    harness.run()
    harness.add(harness.finished[first], 2)
    harness.step()
    assert harness.plans[-1].new_seqs[0].logical_length == 12
    harness.run()
