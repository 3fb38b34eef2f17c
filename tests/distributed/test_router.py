"""How requests are router over engines, whatever comes in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvllm.config import EngineConfig
from kvllm.core.protocol import SampledToken
from kvllm.core.sequence import Sequence, ServiceClass
from kvllm.distributed.replicas.dispatcher import Dispatcher
from kvllm.distributed.replicas.messages import Report, Sampled
from kvllm.distributed.replicas.router import FULLER, HIT_WEIGHT, SEQUENCES_AHEAD, Router, needed_blocks
from kvllm.sampling_params import SamplingParams
from kvllm.stats import EngineStats

BLOCK = 4
Prompt = list[int]

prompts = st.tuples(  # with one of few beginnings, more or less of it
    st.integers(0, 3), st.integers(0, 40), st.lists(st.integers(4, 6), max_size=12)
).map(lambda parts: [parts[0]] * parts[1] + parts[2] + [9])


def make_router(num_engines: int, num_blocks: int = 10**6, max_num_seqs: int = 10**6, shares: bool = True) -> Router:
    return Router([num_blocks] * num_engines, block_size=BLOCK, max_num_seqs=max_num_seqs, shares_prefixes=shares)


def used(router: Router) -> list[int]:
    return [blocks - room for blocks, room in zip(router.num_blocks, router.room, strict=True)]


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(1, 100), st.integers(1, 3)), max_size=60))
def test_different_requests_fill_engines_equally(num_engines: int, requests: list[tuple[int, int]]) -> None:
    router = make_router(num_engines)
    most = 0
    for number, (length, sequences) in enumerate(requests):
        router.place([number] * length, sequences)
        most = max(most, needed_blocks(length, sequences, BLOCK))
        assert max(used(router)) - min(used(router)) <= most
    assert sum(used(router)) == sum(needed_blocks(*request, BLOCK) for request in requests)


@given(st.integers(1, 4), st.lists(prompts, max_size=60), st.booleans())
def test_common_prefixes_leave_no_engine_far_behind(num_engines: int, requests: list[Prompt], shares: bool) -> None:
    router = make_router(num_engines, shares=shares)
    for prompt in requests:
        router.place(prompt, 1)
    blocks = max((len(prompt) // BLOCK for prompt in requests), default=0)
    allowed = HIT_WEIGHT * blocks if shares else 0
    assert max(used(router)) <= min(used(router)) * (1 + FULLER * shares) + allowed + blocks + 1


@given(st.integers(1, 4), st.lists(prompts, min_size=1, max_size=40), st.data())
def test_a_request_goes_where_its_prefix_went_last_unless_it_is_fuller(num_engines, requests, data) -> None:
    """Against the rule, told over the whole history of prompts."""
    router = make_router(num_engines)
    history: list[tuple[Prompt, int]] = []
    for prompt in requests:
        for engine in range(num_engines):
            router.report(engine, 10**6 - data.draw(st.integers(0, 60)))
        before = used(router)
        hits, home = 0, None
        for earlier, engine in history:
            common = next((i for i, (a, b) in enumerate(zip(prompt, earlier, strict=False)) if a != b), None)
            common = min(len(prompt), len(earlier)) if common is None else common
            if common // BLOCK and common // BLOCK >= hits:
                hits, home = common // BLOCK, engine
        chosen = router.place(prompt, 1)
        if home is not None and before[home] <= min(before) * (1 + FULLER) + HIT_WEIGHT * hits:
            assert chosen == home
        else:
            assert before[chosen] == min(before)
        history.append((prompt, chosen))


@given(
    st.lists(st.integers(5, 40), min_size=1, max_size=4),
    st.lists(
        st.one_of(
            st.tuples(st.just("place"), prompts, st.integers(1, 3)),
            st.tuples(st.just("report"), st.integers(0, 3), st.integers(-20, 40)),
            st.tuples(st.just("finish"), st.integers(0, 3)),
            st.tuples(st.just("lose"), st.integers(0, 3)),
        ),
        max_size=80,
    ),
)
def test_an_engine_gets_what_it_has_room_for(num_blocks: list[int], operations: list[tuple]) -> None:
    router = Router(num_blocks, block_size=BLOCK, max_num_seqs=3, shares_prefixes=True)
    room, running = num_blocks[:], [0] * len(num_blocks)
    for name, *arguments in operations:
        engine = arguments[0] % len(num_blocks) if name != "place" else None
        if name == "place":
            prompt, sequences = arguments
            open_engines = [i for i, r in enumerate(room) if r > 0 and running[i] < SEQUENCES_AHEAD * 3]
            engine = router.place(prompt, sequences)
            assert engine in open_engines if open_engines else engine is None
            if engine is not None:
                room[engine] -= needed_blocks(len(prompt), sequences, BLOCK)
                running[engine] += sequences
        elif name == "report":
            room[engine] = min(arguments[1], num_blocks[engine])
            router.report(engine, room[engine])
        elif name == "finish" and running[engine]:
            running[engine] -= 1
            router.finish(engine, 1)
        elif name == "lose":
            room[engine] = running[engine] = 0
            router.lose(engine)
        assert (router.room, router.sequences) == (room, running)


def test_a_lost_engine_has_no_prefixes() -> None:
    router = make_router(2)
    prompt = [1] * 40
    home = router.place(prompt, 1)
    assert router.place(prompt, 1) == home
    router.lose(home)
    other = router.place([1] * 40, 1)
    assert other == 1 - home
    router.report(home, 10**6)
    assert router.place(prompt, 1) == other  # a little fuller, and the prefix is there


def ids_of_waiting(dispatcher: Dispatcher) -> list[int]:
    return sorted(seq.seq_id for seq in dispatcher.waiting.values())


def test_what_a_lost_engine_had_is_queued_again_in_front() -> None:
    """In order of age, with its tokens; each branch of a request on its own."""
    config = EngineConfig(num_blocks=10, max_model_len=64, block_size=BLOCK, max_num_seqs=4)
    dispatcher = Dispatcher(config, [10, 10])
    sampling = SamplingParams(n=2)
    sequences = [Sequence(2 * i, str(i), [i] * 8, sampling, seed=i, max_length=32, forks=1) for i in range(8)]
    for seq in sequences:
        dispatcher.add(seq)
    dispatcher.dispatch()
    assert ids_of_waiting(dispatcher) == [12, 14]  # the other six fill two pools
    sent = [dispatcher.take(engine) for engine in (0, 1)]
    assert [[start.seq_id for start in starts or []] for starts in sent] == [[0, 4, 8], [2, 6, 10]]
    tokens = [(4, SampledToken(7)), (5, SampledToken(8))]
    ((parent, _), (child, token)), _ = next(dispatcher.receive(0, Report([Sampled(tokens)], EngineStats(10), 0)))
    assert parent is sequences[2] and (child.seq_id, child.index, child.seed, token.token_id) == (5, 1, 2 ^ 1 << 32, 8)
    dispatcher.finish(sequences[0])
    dispatcher.lose(0)
    assert ids_of_waiting(dispatcher) == [4, 5, 8, 12, 14] and dispatcher.take(0) is None
    dispatcher.router.report(0, 10)
    dispatcher.dispatch()
    assert list(dispatcher.receive(0, Report([], EngineStats(10), 10))) == []
    assert dispatcher.router.room[0] == 10 - 3 - 3 - 4  # of what it was not sent yet, it does not know
    again = dispatcher.take(0)
    assert again and [(start.seq_id, start.token_ids[8:], start.sampling.n) for start in again[:3]] == [
        (4, [7], 1),
        (5, [8], 1),
        (8, [], 2),
    ]


def test_a_replica_whose_requests_were_all_aborted_has_room() -> None:
    """It reports nothing then."""
    config = EngineConfig(num_blocks=10, max_model_len=64, block_size=BLOCK, max_num_seqs=4)
    dispatcher = Dispatcher(config, [10])
    for turn in range(2):
        sequences = [
            Sequence(
                10 * turn + i,
                str(i),
                [i] * 8,
                SamplingParams(),
                seed=i,
                max_length=32,
                service_class=ServiceClass(tenant="ab"[i % 2]),
            )
            for i in range(8)
        ]
        for seq in sequences:
            dispatcher.add(seq)
        dispatcher.dispatch()
        assert len(dispatcher.placed) >= 4 and dispatcher.waiting
        for seq in sequences:
            dispatcher.finish(seq)
        assert not dispatcher.placed and not dispatcher.waiting


def test_what_it_remembers_of_prefixes_is_bounded() -> None:
    router = make_router(2, num_blocks=50)
    for number in range(100):
        router.report(0, 50)
        router.place([number] * 40, 1)
    assert len(router._replica_of) == 100
