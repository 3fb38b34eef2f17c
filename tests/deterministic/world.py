"""One run of a scenario: engine, server, clients and faults in one thread, and what must hold at every moment."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import traceback
from contextlib import ExitStack
from typing import Any, cast
from types import SimpleNamespace
from unittest.mock import patch

from msgspec import Struct

import kvllm.async_llm
import kvllm.distributed.replicas.replica
from kvllm import RequestOutput
from kvllm.async_llm import AsyncLLM
from kvllm.core.engine import LLMEngine
from kvllm.core.executor import WorkersRestarted
from kvllm.core.protocol import StepPlan, encode
from kvllm.distributed.replicas.engine import DataParallelEngine
from kvllm.errors import EngineDeadError, RequestError
from kvllm.serving.app import make_app
from kvllm.serving.state import ServerOptions, ServerState
from tests.deterministic.clock import Interrupted, VirtualClock, VirtualLoop, simulated_engine_loop
from tests.deterministic.exact_model import END, VOCAB, ExactModel
from tests.deterministic.oracle import alone, ending
from tests.deterministic.replicas import SimulatedReplicas
from tests.deterministic.scenario import Arrival, Scenario, make_config
from tests.helpers.tokenizers import byte_level

MOST_STEPS = 20_000
CANNOT = "this row cannot be sampled"


class CallbackFailed(Exception):
    """What a client's own callback raises."""


class Outcome(Struct):
    """failure: what did not hold, with the place; None if all did. steps: of all workers. trace: a digest of all plans
    with their times, and of what clients got."""

    failure: str | None
    steps: int
    trace: str


class Got(Struct):
    """What a client has of a request. missing: KV pairs that its sequences had lost to compression at their ends."""

    tokens: list[list[int]]
    reasons: list[str | None]
    error: BaseException | None = None
    left: bool = False
    missing: int = 0

    def take(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            self.tokens[completion.index] += completion.token_ids
            self.reasons[completion.index] = completion.finish_reason
        self.missing = output.metrics.missing_entries
        if output.error is not None:
            self.error = output.error


def run(scenario: Scenario) -> Outcome:
    """Run a scenario to its end, or to the first thing that does not hold."""
    return World(scenario).run()


class World:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.config = make_config(scenario.options)
        self.rng = random.Random(scenario.seed)
        self.clock = VirtualClock()
        self.models: list[ExactModel] = []
        self.steps = 0
        self.died = False
        self.broken_rows = 0
        self.trace = hashlib.blake2b(digest_size=8)
        self.failures: list[str] = []
        kinds = ("restart", "row", "engine", *(("interrupt",) if scenario.replicas == 1 else ()))
        self._step_faults = {fault.step: fault for fault in scenario.faults if fault.kind in kinds}
        self._interrupts = {fault.step for fault in scenario.faults if fault.kind == "interrupt"}
        self._looks = 0

    def run(self) -> Outcome:
        loop_class = simulated_engine_loop(self._step_seconds, self._after_turn)
        loop = VirtualLoop(self.clock, self.rng)
        loop.set_exception_handler(lambda _, context: self._note(context.get("exception") or context["message"]))
        with ExitStack() as stack:
            stack.enter_context(self.clock.installed())
            stack.enter_context(patch.object(kvllm.async_llm, "EngineLoop", loop_class))
            stack.enter_context(patch.object(kvllm.distributed.replicas.replica, "EngineLoop", loop_class))
            try:
                loop.run_until_complete(self._main())
            except Exception as error:
                self._note(error)
            finally:
                loop.end()
        return Outcome(self.failures[0] if self.failures else None, self.steps, self.trace.hexdigest())

    # The parts

    def _make_engine(self) -> LLMEngine:
        model = ExactModel(self.config, self.rng, loss=self.scenario.loss, before_result=self._before_result)
        self.models.append(model)
        tokenizer = byte_level("chat") if self.scenario.has_text else None
        return LLMEngine(self.config, model, vocab_size=VOCAB, eos_token_ids=(END,), tokenizer=tokenizer)

    def _make_llm(self) -> AsyncLLM:
        if self.scenario.replicas == 1:
            self.engine: LLMEngine | DataParallelEngine = self._make_engine()
        else:
            self.replicas = SimulatedReplicas(
                self.config, self.scenario.replicas, self.rng, self._make_engine, self._before_receiving
            )
            tokenizer = byte_level("chat") if self.scenario.has_text else None
            replicas = cast("Any", self.replicas)
            options = {"vocab_size": VOCAB, "eos_token_ids": (END,), "tokenizer": tokenizer}
            self.engine = DataParallelEngine(self.config, replicas, **options)
        return AsyncLLM(self.engine, cast("Any", SimpleNamespace(vocab_size=VOCAB)))

    async def _main(self) -> None:
        self.llm = self._make_llm()
        if self.scenario.has_text:
            state = ServerState(cast("Any", SimpleNamespace(sampling_defaults={})), ServerOptions(("model",)), self.llm)
            self.app = make_app(state)
        for fault in self.scenario.faults:
            if fault.kind in ("clock", "replica", "forget"):
                asyncio.get_running_loop().call_later(fault.at, self._strike, fault.kind)
        clients = [self._client(str(i), arrival) for i, arrival in enumerate(self.scenario.arrivals)]
        got = await asyncio.gather(*clients)
        while not (self.llm._loop.is_idle or self.died):
            await asyncio.sleep(0.1)
        for i, (arrival, each) in enumerate(zip(self.scenario.arrivals, got, strict=True)):
            self._judge(i, arrival, each)
        self._check_end()

    def _step_seconds(self) -> float:
        return self.rng.choice((0.001, 0.01, 0.03))

    # Faults

    def _strike(self, kind: str) -> None:
        if kind == "clock":
            self.clock.advance(self.rng.choice((1.0, 5000.0)))
        elif kind == "forget":
            self.llm._loop.submit(lambda engine: engine.reset_prefix_cache())
        elif self.scenario.replicas > 1:
            self.rng.choice(self.replicas.replicas).kill()

    def _before_result(self, plan: StepPlan) -> None:
        self.steps += 1
        self.trace.update(encode(plan) + str(self.clock.now).encode())
        if self.steps > MOST_STEPS:
            raise AssertionError(f"not finished after {MOST_STEPS} steps")
        fault = self._step_faults.get(self.steps)
        if fault is None:
            return
        model = next(model for model in self.models if model.is_running)
        if fault.kind == "row":
            model.broken = CANNOT
            self.broken_rows += 1
            return
        if fault.executed:
            model.run(plan)
        if fault.kind == "restart":
            model.restart()
            raise WorkersRestarted
        if fault.kind == "interrupt":
            raise Interrupted
        self.died = self.scenario.replicas == 1
        raise RuntimeError("the step has failed")

    def _before_receiving(self) -> None:
        self._looks += 1
        if self._looks in self._interrupts:
            raise Interrupted

    # Clients

    async def _client(self, name: str, arrival: Arrival) -> Got:
        await asyncio.sleep(arrival.at)
        number = arrival.params.n
        got = Got([[] for _ in range(number)], [None] * number)
        talk = {"generate": self._generate, "deliver": self._deliver}.get(arrival.via, self._ask)
        task = asyncio.ensure_future(talk(name, arrival, got))
        if arrival.leave_at is not None:
            await asyncio.wait((task,), timeout=arrival.leave_at)
            if not task.done() and arrival.via in ("generate", "deliver"):
                got.left = True
                task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        except (RequestError, EngineDeadError, CallbackFailed) as error:
            got.error = error
        self.trace.update(repr((name, got.tokens, got.reasons)).encode())
        return got

    async def _generate(self, name: str, arrival: Arrival, got: Got) -> None:
        if arrival.abort_at is not None:
            asyncio.get_running_loop().call_later(arrival.abort_at, lambda: asyncio.ensure_future(self.llm.abort(name)))
        async for item in self.llm.generate(_prompt(arrival), arrival.params, name, **_service(arrival)):
            got.take(item)
            if arrival.pause:
                await asyncio.sleep(arrival.pause)

    async def _deliver(self, name: str, arrival: Arrival, got: Got) -> None:
        items = 0

        def receive(item: RequestOutput) -> Any:
            nonlocal items
            items += 1
            if items == arrival.raises_at:
                raise CallbackFailed
            got.take(item)
            return asyncio.sleep(arrival.pause) if arrival.pause else None

        await self.llm.deliver(_prompt(arrival), arrival.params, name, receive, **_service(arrival))

    async def _ask(self, name: str, arrival: Arrival, got: Got) -> None:
        """A request to the server, whole or as a stream."""
        gone = asyncio.Event()
        if arrival.leave_at is not None:
            asyncio.get_running_loop().call_later(arrival.leave_at, gone.set)
        options = {key: value for key, value in arrival.sampling.items() if key not in ("compress", "logprobs")}
        options["max_tokens"] = min(options["max_tokens"], self.config.max_model_len - len(arrival.prompt))
        more = {"priority": arrival.priority, "stream": arrival.via == "stream", "return_token_ids": True}
        salt = {"cache_salt": arrival.salt} if arrival.salt else {}
        body = json.dumps({"model": "model", "prompt": arrival.prompt, **options, **more, **salt}).encode()
        half = self.rng.randrange(len(body))
        parts = [(body[:half], True), (body[half:], False)]
        status, written = 0, b""

        async def receive() -> dict[str, Any]:
            if parts:
                content, more_body = parts.pop(0)
                return {"type": "http.request", "body": content, "more_body": more_body}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status, written
            status = message.get("status", status)
            if not gone.is_set():
                written += message.get("body", b"")
            if arrival.pause:
                await asyncio.sleep(arrival.pause)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
        headers = [(b"content-type", b"application/json"), (b"x-request-id", name.encode())]
        await self.app({**scope, "headers": headers}, receive, send)
        got.left = gone.is_set()
        _read_answer(got, status, written, stream=arrival.via == "stream")

    # What must hold

    def _after_turn(self, engine: Any) -> None:
        if isinstance(engine, LLMEngine):
            engine.scheduler.check()

    def _note(self, error: Any) -> None:
        if isinstance(error, BaseException):
            places = traceback.extract_tb(error.__traceback__)[-4:]
            where = " < ".join(
                f"{place.filename.rpartition('/')[2]}:{place.lineno} {place.name}" for place in reversed(places)
            )
            self.failures.append(f"{type(error).__name__}: {error} ({where})")
        else:
            self.failures.append(str(error))

    def _judge(self, number: int, arrival: Arrival, got: Got) -> None:
        """Each request gave what it gives alone, or has ended for a reason that its history explains."""
        name = f"request {number}"
        if got.error is not None and not self._is_explained(arrival, got.error):
            self.failures.append(f"{name}: {type(got.error).__name__}: {got.error}")
        if self.config.compression and arrival.sampling.get("compress", True):
            return self._judge_compressed(name, arrival, got)
        for index, tokens in enumerate(got.tokens):
            windows = [group.window for group in self.config.kv_groups for _ in group.parts]
            expected, reason = alone(arrival.prompt, arrival.params, index, windows, self.config.max_model_len)
            if tokens != expected[: len(tokens)]:
                self.failures.append(f"{name}, completion {index}: {tokens} and not {expected} as alone")
            elif got.error is None and not self._is_cut(arrival, got, index) and not arrival.sampling.get("stop"):
                if (len(tokens), got.reasons[index]) != (len(expected), reason):
                    self.failures.append(
                        f"{name}, completion {index} ends after {len(tokens)} tokens by {got.reasons[index]}, alone "
                        f"after {len(expected)} by {reason}"
                    )
        return None

    def _judge_compressed(self, name: str, arrival: Arrival, got: Got) -> None:
        """Its tokens were checked where they were made; here, where it ends."""
        params = arrival.params
        most = min(params.max_tokens or 10**9, self.config.max_model_len - len(arrival.prompt))
        for index, tokens in enumerate(got.tokens):
            ends = [ending(tokens[:count], params, most) for count in range(1, len(tokens) + 1)]
            if any(ends[:-1]):
                self.failures.append(f"{name}, completion {index} goes on after its end: {tokens}")
            elif got.error is None and not self._is_cut(arrival, got, index) and not arrival.sampling.get("stop"):
                if not ends or ends[-1] != got.reasons[index]:
                    self.failures.append(f"{name}, completion {index} ends by {got.reasons[index]}: {tokens}")

    def _is_cut(self, arrival: Arrival, got: Got, index: int) -> bool:
        """Whether it may have ended early."""
        aborted = arrival.abort_at is not None and got.reasons[index] == "abort"
        return got.left or aborted

    def _is_explained(self, arrival: Arrival, error: BaseException) -> bool:
        if isinstance(error, CallbackFailed):
            return arrival.raises_at is not None
        if isinstance(error, EngineDeadError):
            return self.died
        if CANNOT in str(error):
            self.broken_rows -= 1
            return self.broken_rows >= 0
        return "KV blocks" in str(error) or "budget" in str(error)  # it would not fit alone

    def _check_end(self) -> None:
        """Everything has come back."""
        if self.died:
            return
        assert not self.engine.has_unfinished_requests(), "requests are left"
        engine = self.engine
        if isinstance(engine, LLMEngine):
            for _ in range(3):  # workers are told of the last ones that ended, and loads end
                engine.step()
            assert engine.scheduler.blocks.num_owned == 0
            model = self.models[0]
            assert not model.sequences, "the workers have sequences that have ended"
            assert not model.host.loads and not model.host.suspended, "the host keeps what has ended"
        else:
            dispatcher = engine.dispatcher
            assert not any(dispatcher.router.sequences), "the router counts sequences that have ended"
            assert not any(dispatcher.crowding._placed), "a tenant has not got its places back"
            assert not dispatcher._prepaid, "a tenant has paid for what has ended"


def _prompt(arrival: Arrival) -> Any:
    return {"prompt_token_ids": arrival.prompt}


def _service(arrival: Arrival) -> dict[str, Any]:
    return {"priority": arrival.priority, "tenant": arrival.tenant, "cache_salt": arrival.salt}


def _read_answer(got: Got, status: int, written: bytes, *, stream: bool) -> None:
    """Take the tokens out of a server's answer."""
    if got.left and not (stream and status):
        return
    if status != 200:
        got.error = RequestError(f"{status}: {written.decode()}")
        if status == 503:
            got.error = EngineDeadError(written.decode())
        return
    texts = [line[6:] for line in written.decode().split("\n\n") if line.startswith("data: ")] if stream else [written]
    for text in texts:
        if text == "[DONE]":
            continue
        answer = json.loads(text)
        if "error" in answer:
            message = answer["error"]["message"]
            got.error = EngineDeadError(message) if "engine" in message else RequestError(message)
        for choice in answer.get("choices", ()):
            got.tokens[choice["index"]] += choice["token_ids"]
            got.reasons[choice["index"]] = choice["finish_reason"]
