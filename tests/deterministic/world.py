"""One run of a scenario: engine, server, clients and faults in one thread, and what must hold at every moment."""

from __future__ import annotations

import asyncio
import hashlib
import random
import traceback
from contextlib import ExitStack
from functools import cache
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from msgspec import Struct

import kvllm.async_llm
from kvllm.async_llm import AsyncLLM
from kvllm.core.engine import LLMEngine
from kvllm.core.executor import WorkersRestarted
from kvllm.core.protocol import decode_plan
from kvllm.distributed.replicas import replica
from kvllm.distributed.replicas.engine import DataParallelEngine
from kvllm.errors import EngineDeadError, WorkerError
from kvllm.structured.compile import Grammars
from kvllm.structured.vocabulary import read_vocabulary
from kvllm.tokenizer import Tokenizer
from tests.deterministic.answer_check import AnswerCheck
from tests.deterministic.clients import CallbackFailed, Clients, Got
from tests.deterministic.clock import Interrupted, VirtualClock, VirtualLoop, simulated_engine_loop
from tests.deterministic.exact_model import END, VOCAB, ExactModel
from tests.deterministic.replicas import SimulatedReplicas
from tests.deterministic.scenario import RULES, SERVER, Arrival, Fault, Scenario, make_config
from tests.deterministic.server import AdapterFiles, SimulatedServer
from tests.helpers.tokenizers import byte_level

MOST_STEPS = 20_000
CANNOT = "this row cannot be sampled"
UNREADABLE = "these tokens cannot be decoded"


class Outcome(Struct):
    """failure: what did not hold, with the place; None if all did. steps: of all workers. trace: a digest of all plans
    with their times, and of what clients got."""

    failure: str | None
    steps: int
    trace: str


def run(scenario: Scenario) -> Outcome:
    """Run a scenario to its end, or to the first thing that does not hold."""
    return World(scenario).run()


@cache
def grammars() -> Grammars:
    """Of the model's vocabulary."""
    tokenizer = byte_level("chat")
    return Grammars(lambda: read_vocabulary(tokenizer, len(tokenizer.hf), (END,)), (END,))


class Compiler:
    """Refuses rules of structured outputs that do not compile, without a process for it."""

    def __init__(self, grammars: Grammars) -> None:
        self.check = grammars.compile

    def close(self) -> None:
        """Nothing to release."""


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
        self.drains = False
        self.grammars = grammars() if scenario.has_text else None
        self.vocab_size = len(byte_level("chat").hf) if scenario.has_text else VOCAB
        self.prompts: dict[str, list[int]] = {}
        self.contents: dict[str, str] = {}
        for i, arrival in enumerate(scenario.arrivals):
            self._read_prompt(str(i), arrival)
        self._calls = self._unread = 0
        self._unreadable = {fault.step for fault in scenario.faults if fault.kind == "text"}
        self.trace = hashlib.blake2b(digest_size=8)
        self.failures: list[str] = []
        kinds = ("restart", "row", "engine", *(("interrupt",) if scenario.replicas == 1 else ()))
        self._step_faults = {fault.step: fault for fault in scenario.faults if fault.kind in kinds}
        self._interrupts = {fault.step for fault in scenario.faults if fault.kind == "interrupt"}
        self._looks = 0
        self._changes: list[asyncio.Future[None]] = []

    def run(self) -> Outcome:
        loop_class = simulated_engine_loop(self._step_seconds, self._after_turn)
        loop = VirtualLoop(self.clock, self.rng)
        loop.set_exception_handler(lambda _, context: self._note(context.get("exception") or context["message"]))
        with ExitStack() as stack:
            stack.enter_context(self.clock.installed())
            stack.enter_context(patch.object(kvllm.async_llm, "EngineLoop", loop_class))
            stack.enter_context(patch.object(replica, "EngineLoop", loop_class))
            stack.enter_context(patch.object(Tokenizer, "decode", self._failing(Tokenizer.decode)))
            try:
                loop.run_until_complete(self._main())
            except Exception as error:
                self._note(error)
            finally:
                loop.end()
        return Outcome(self.failures[0] if self.failures else None, self.steps, self.trace.hexdigest())

    # The parts

    def _make_engine(self) -> LLMEngine:
        loss, grammars = self.scenario.loss, self.grammars
        model = ExactModel(self.config, self.rng, loss=loss, grammars=grammars, before_result=self._before_result)
        if self.models and self.scenario.replicas == 1:
            model.host.disk = self.models[-1].host.disk
        self.models.append(model)
        return LLMEngine(self.config, model, **self._engine_options())

    def _engine_options(self) -> dict[str, Any]:
        checker = cast("Any", Compiler(self.grammars)) if self.grammars else None
        files = {"tokenizer": self._make_tokenizer(), "grammars": checker, "adapters": AdapterFiles()}
        return {"vocab_size": self.vocab_size, "eos_token_ids": (END,), **files}

    def _make_tokenizer(self) -> Tokenizer | None:
        """One that has decoded nothing yet: how often it does is part of a scenario."""
        return Tokenizer(byte_level("chat").hf) if self.scenario.has_text else None

    def _read_prompt(self, name: str, arrival: Arrival) -> None:
        """The prompt that the model sees of a request. That of a chat is around the text of its tokens."""
        self.prompts[name] = arrival.prompt
        if arrival.route == "completions":
            return
        tokenizer = byte_level("chat").hf
        self.contents[name] = tokenizer.decode(arrival.prompt[: self.config.max_model_len // 3])
        message = {"role": "user", "content": self.contents[name]}
        found = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        self.prompts[name] = cast("list[int]", found)

    def _make_llm(self) -> AsyncLLM:
        if self.scenario.replicas == 1:
            self.engine: LLMEngine | DataParallelEngine = self._make_engine()
        else:
            self.replicas = SimulatedReplicas(
                self.config, self.scenario.replicas, self.rng, self._make_engine, self._before_receiving
            )
            self.engine = DataParallelEngine(self.config, cast("Any", self.replicas), **self._engine_options())
        self.llm = AsyncLLM(self.engine, cast("Any", SimpleNamespace(vocab_size=self.vocab_size, dtype="float32")))
        self.died = False
        return self.llm

    async def _main(self) -> None:
        scenario, max_loras = self.scenario, self.config.max_loras
        self.server = SimulatedServer(self._make_llm, max_loras=max_loras, supervised=scenario.supervised)
        try:
            await self._serve()
        finally:
            self.server.close()

    async def _serve(self) -> None:
        for fault in self.scenario.faults:
            if fault.kind in ("clock", "replica", "forget", "drain", "load", "unload"):
                asyncio.get_running_loop().call_later(fault.at, self._strike, fault)
        clients = Clients(lambda: self.llm, self.server.app, self.prompts, self.contents, self.config, self.rng)
        asked = [clients.ask(str(i), arrival) for i, arrival in enumerate(self.scenario.arrivals)]
        got = await asyncio.gather(*asked)
        await asyncio.gather(*self._changes)
        await self.server.wait_for_engine()
        while not (self.llm._loop.is_idle or self.died):
            if failure := self.llm._loop.failure:
                raise failure
            await asyncio.sleep(0.1)
        for i, (arrival, each) in enumerate(zip(self.scenario.arrivals, got, strict=True)):
            self._judge(str(i), arrival, each)
        self._check_end()

    def _step_seconds(self) -> float:
        return self.rng.choice((0.001, 0.01, 0.03))

    # Faults

    def _strike(self, fault: Fault) -> None:
        kind = fault.kind
        if kind == "clock":
            self.clock.advance(self.rng.choice((1.0, 5000.0)))
        elif kind in ("load", "unload"):
            self._changes.append(asyncio.ensure_future(self.server.reconfigure(kind, fault.step)))
        elif kind == "forget":
            self.llm._loop.submit(lambda engine: engine.reset_prefix_cache())
        elif kind == "drain":
            self.drains = self.server.state.admission.is_draining = True
        elif self.scenario.replicas > 1:
            self.rng.choice(self.replicas.replicas).kill()

    def _before_result(self, plan: bytes) -> None:
        self.steps += 1
        self.trace.update(plan + str(self.clock.now).encode())
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
            model.run(decode_plan(plan))
        if fault.kind == "restart":
            model.restart()
            self._spend(model)
            raise WorkersRestarted
        if fault.kind == "interrupt":
            raise Interrupted
        self._die()
        raise RuntimeError("the step has failed")

    def _spend(self, model: ExactModel) -> None:
        """Replace a model's workers, if that was not done too often."""
        try:
            model.restarts.spend(WorkerError("the workers are lost"))
        except WorkerError:
            self._die()
            raise

    def _die(self) -> None:
        if self.scenario.replicas == 1:
            self.died = True
            self.server.note_death()

    def _failing(self, decode: Any) -> Any:
        """A tokenizer's `decode` that fails at some calls."""

        def fail_at_times(*args: Any, **options: Any) -> str:
            self._calls += 1
            if self._calls in self._unreadable:
                raise RuntimeError(UNREADABLE)
            return decode(*args, **options)

        return fail_at_times

    def _before_receiving(self) -> None:
        self._looks += 1
        if self._looks in self._interrupts:
            raise Interrupted

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

    def _judge(self, name: str, arrival: Arrival, got: Got) -> None:
        """Each request gave what it gives alone, or has ended for a reason that its history explains."""
        self.trace.update(repr((name, got.tokens, got.reasons)).encode())
        if got.error is not None and not self._is_explained(arrival, got, got.error):
            self.failures.append(f"request {name}: {type(got.error).__name__}: {got.error}")
        check = AnswerCheck(self.config, self.grammars, name, arrival, self.prompts[name])
        found = [check.failures(got, adapter or "") for adapter in self._adapters_of(arrival, got)]
        self.failures += min(found, key=len)

    def _adapters_of(self, arrival: Arrival, got: Got) -> list[str | None]:
        """Digests of the adapters that it may have been computed with. Only names that the server knows may change."""
        if arrival.adapter and arrival.via in SERVER:
            return self.server.digests(arrival.adapter, got.asked, got.ended)
        return [arrival.adapter]

    def _is_explained(self, arrival: Arrival, got: Got, error: BaseException) -> bool:
        if isinstance(error, CallbackFailed):
            return arrival.raises_at is not None
        if isinstance(error, EngineDeadError):
            was_dead = any(begin <= got.ended and got.asked <= end for begin, end in self.server.dead)
            return was_dead or (self.drains and "shutting down" in str(error))
        if str(error).startswith("404"):
            return None in self._adapters_of(arrival, got)
        if UNREADABLE in str(error) or "has failed to answer: its log says why" in str(error):
            self._unread += 1
            return self._unread <= len(self._unreadable)
        if "structured_outputs" in str(error):
            return arrival.sampling.get("structured_outputs") == RULES[-1]
        if CANNOT in str(error):
            self.broken_rows -= 1
            return self.broken_rows >= 0
        return "KV blocks" in str(error) or "budget" in str(error)  # it would not fit alone

    def _check_end(self) -> None:
        """Everything has come back."""
        if self.died:
            return
        assert not self.engine.has_unfinished_requests(), "requests are left"
        engine, self._step_faults = self.engine, {}
        if isinstance(engine, LLMEngine):
            for _ in range(3):  # workers are told of the last ones that ended, and loads end
                engine.step()
            assert engine.scheduler.blocks.num_owned == 0
            model = self.models[-1]
            assert not model.sequences, "the workers have sequences that have ended"
            assert not model.host.loads and not model.host.suspended, "the host keeps what has ended"
        else:
            dispatcher = engine.dispatcher
            assert not any(dispatcher.router.sequences), "the router counts sequences that have ended"
            assert not any(dispatcher.crowding._placed), "a tenant has not got its places back"
            assert not dispatcher._prepaid, "a tenant has paid for what has ended"
