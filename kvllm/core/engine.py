"""Requests in, outputs out: the step loop."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from kvllm.config import EngineConfig
from kvllm.core.drafting.step_cost import StepCost
from kvllm.core.executor import Executor, WorkersRestarted
from kvllm.core.input_processor import InputProcessor
from kvllm.core.output_processor import OutputProcessor, SequenceToken
from kvllm.core.protocol import PhaseSeconds, PromptLogprobs, StepPlan, StepResult
from kvllm.core.request import Request
from kvllm.core.scheduler import Scheduler
from kvllm.core.sequence import ANONYMOUS, Sequence, ServiceClass
from kvllm.core.snapshot import EngineSnapshot, take_snapshot
from kvllm.core.transition import Transition
from kvllm.errors import WorkerError
from kvllm.lora.request import Adapter, LoRARequest
from kvllm.outputs import RequestOutput
from kvllm.prompts import Prompt
from kvllm.sampling_params import SamplingParams
from kvllm.stats import EngineStats

if TYPE_CHECKING:
    from kvllm.lora.files import Adapters
    from kvllm.structured.checker import GrammarChecker
    from kvllm.tokenizer import Tokenizer


class LLMEngine:
    """Adds requests, steps all of them together, reports what each has produced.

    Each of `add_request`, `step` and `abort` is one transition. If an exception ends it early, an interrupt included,
    the next call begins with a recovery: the requests keep the tokens that they have, and everything else is made again
    from these. So no request, block or table slot is lost, wherever the exception fell.

    tokenizer: None if the checkpoint has none; then prompts are token ids and outputs carry no text.
    grammars: refuses structured outputs that cannot be followed; without it, all are refused.
    adapters: opens those of requests; without it, all are refused.
    step_cost: what steps take, for drafts; None: all that are found are tried.
    sampled: the tokens of the last step, each with its sequence.
    prompts: the log probabilities of prompts that it has found, each with its sequence.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
        grammars: GrammarChecker | None = None,
        adapters: Adapters | None = None,
        step_cost: StepCost | None = None,
    ) -> None:
        self.config = config
        self.executor = executor
        self.stats = EngineStats(num_blocks=config.num_blocks)
        self.scheduler = Scheduler(config, self.stats, step_cost)
        self.inputs = InputProcessor(config, vocab_size, tokenizer, grammars, adapters)
        self.outputs = OutputProcessor(frozenset(eos_token_ids), tokenizer)
        self.sampled: list[SequenceToken] = []
        self.prompts: list[tuple[Sequence, PromptLogprobs]] = []
        self._launched: StepPlan | None = None  # in flight between two steps
        self._step_seconds = 0.0  # of all steps: time passes for a sequence only while the engine is at work
        self._is_closed = False
        self._transition = Transition(self._recover)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        stream: bool = True,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
        lora_request: LoRARequest | Adapter | None = None,
    ) -> RequestOutput:
        """Queue a request.

        Args:
            request_id: unique among unfinished requests.
            prompt: text, token ids, or a dict with one of `prompt` and `prompt_token_ids`.
            stream: keep the text current at every step; otherwise it is set when a completion ends.
            priority: see ServiceClass, also for `tenant` and `cache_salt`.
            lora_request: the adapter to compute it with, None for the model as it is.

        Returns:
            The output, still empty: the object that `step` returns as it grows.

        Raises:
            RequestError: the request cannot be served. Nothing else is affected.
            ConfigError: `sampling_params` are no SamplingParams.
        """
        self.outputs.check_id(request_id)
        service_class = ServiceClass(priority, tenant, cache_salt, self.inputs.adapter_of(lora_request))
        return self._add(self.inputs.new_request(request_id, prompt, sampling_params, stream, service_class))

    def resume_request(
        self,
        request_id: str,
        token_ids: list[int],
        prompt_length: int,
        sampling_params: SamplingParams,
        seed: int,
        service_class: ServiceClass = ANONYMOUS,
    ) -> RequestOutput:
        """Queue a request that another engine has begun.

        Args:
            token_ids: the prompt of `prompt_length` tokens, and the output so far, which is computed again. With
                output, `sampling_params.n` is 1.
            seed: the sequence's, which `sampling_params` need not bring.
        """
        request = self.inputs.resumed_request(
            request_id, token_ids, prompt_length, sampling_params, seed, service_class
        )
        return self._add(request)

    def abort(self, request_id: str) -> None:
        """End a request now, with `finish_reason="abort"`. Unknown or finished ids are ignored."""
        with self._transition():
            for seq in self.outputs.abort(request_id):
                self.scheduler.finish(seq)
            self._count_now()

    def reset_prefix_cache(self) -> None:
        """Let later requests find nothing of what is cached so far. Running ones keep their blocks."""
        with self._transition():
            self.scheduler.forget_prefixes()

    def has_unfinished_requests(self) -> bool:
        return bool(self.outputs.requests)

    def step(self) -> list[RequestOutput]:
        """Run one step.

        Returns:
            The requests that got tokens. An output object belongs to its request and grows with it: copy what must not
            change. After an exception no request is lost: the next step computes the running ones again.
        """
        begin = time.monotonic()
        self.sampled, self.prompts = [], []
        with self._transition():
            try:
                plan, result, sampled = self._execute()
            except WorkersRestarted:  # a step without tokens: all is computed again from the tokens so far
                self._recover()
                return []
            self.sampled, self.prompts = sampled, self.scheduler.prompts_of(result)
            if any(token.error and seq.adapter for seq, token in sampled):  # it may be missing in what was cached
                self.scheduler.forget_prefixes()
            self._count_stalls(time.monotonic() - begin, compressed=bool(plan.compressions or plan.choices))
            self.sampled, ended = self.outputs.process(self.sampled, self.prompts)
            for seq in ended:
                self.scheduler.finish(seq)
                self.stats.output_tokens -= seq.sampling.max_tokens == 0  # nobody gets what was sampled
            self._count(plan, result)
            self._count_now()
            self.stats.step_seconds += time.monotonic() - begin
        if not self.scheduler.has_unfinished and self.scheduler.blocks.num_owned:
            raise RuntimeError(f"{self.scheduler.blocks.num_owned} KV blocks are owned, but no request is unfinished")
        return self.outputs.take_touched()

    def snapshot(self, now: float) -> EngineSnapshot:
        """The state of the engine at time.monotonic() = `now`, between two steps."""
        return take_snapshot(self.scheduler, self.outputs.requests, self.stats, now)

    def num_computed(self, seq: Sequence) -> int:
        """Tokens of a sequence that are computed, those that compression has dropped among them."""
        return seq.logical_length

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.inputs.tokenizer

    def use_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Make the text of requests that are added from now on."""
        self.inputs.tokenizer = self.outputs.tokenizer = tokenizer

    def close(self) -> None:
        """End the workers. Where prefixes are kept on a disk, those in the pool go there before."""
        self.inputs.close()
        if self.config.kv_offloading_path is not None and not self.has_unfinished_requests() and not self._is_closed:
            with suppress(WorkersRestarted, WorkerError):
                for plan in self.scheduler.last_plans():
                    self.executor.execute(plan)
        self._is_closed = True
        self.executor.close()

    def _add(self, request: Request) -> RequestOutput:
        self.outputs.prepare(request)
        request.limit(self.scheduler.longest_of(request.sequences[0]))
        with self._transition():
            self.scheduler.add(request.sequences[0])
            self.outputs.requests[request.request_id] = request
            self._count_now()
        return request.output

    def _execute(self) -> tuple[StepPlan, StepResult, list[SequenceToken]]:
        """Execute the plan that is in flight, or a new one, and receive its tokens. If it can be, the next one is
        planned meanwhile. It is launched at once, or as soon as these tokens are there if the workers need them from
        here; in any case before anything is made of them."""
        plan = self._launched or self._launch(self.scheduler.schedule())
        self._launched = None
        self.scheduler.advance(plan)
        planned = self._plan_ahead()
        waits = not self.executor.fills_pending or self.scheduler.step.restarts_pending
        if planned and not waits:
            self._launched = self._launch(planned)
        result = self.executor.collect()
        sampled = self.scheduler.receive(plan, result)
        if planned and waits:
            self._launched = self._launch(planned)
        return plan, result, sampled

    def _launch(self, plan: StepPlan) -> StepPlan:
        self.scheduler.step.resolve(self.scheduler.running)
        self.executor.launch(plan)
        return plan

    def _plan_ahead(self) -> StepPlan | None:
        """The step after one that is in flight, unless there will be none, or it depends on loads or drafts."""
        scheduler = self.scheduler
        if not self.config.async_scheduling or scheduler.waits_for_loads or scheduler.waits_for_drafts:
            return None
        scheduler.finish_longest()
        return scheduler.schedule() if scheduler.has_unfinished else None

    def _recover(self) -> None:
        """Make everything again from the requests' tokens. If this is cut short, too, the next call does it all."""
        self._launched = None
        self.scheduler.reset(self.outputs.restore())

    # Statistics

    def _count_stalls(self, seconds: float, *, compressed: bool) -> None:
        """seconds: that this step took."""
        self._step_seconds += seconds
        sequences = {seq for seq, _ in self.sampled}
        last_times = Counter(seq.last_token_time for seq in sequences)
        for last_time, number in last_times.items():
            if last_time is not None:
                self.stats.stalls.add(self._step_seconds - last_time, number)
                if compressed:
                    self.stats.event_stalls.add(self._step_seconds - last_time, number)
        for seq in sequences:
            seq.last_token_time = self._step_seconds

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        self.stats.output_tokens += len(self.sampled)
        self._count_seconds(plan, result.seconds)
        self.stats.recalled_bytes += result.recalled_bytes
        self.stats.peak_event_bytes = max(self.stats.peak_event_bytes, result.event_bytes)

    def _count_now(self) -> None:
        stats, scheduler = self.stats, self.scheduler
        stats.num_running, stats.num_waiting = len(scheduler.running), len(scheduler.waiting)
        stats.blocks_in_use = scheduler.blocks.num_owned

    def _count_seconds(self, plan: StepPlan, seconds: PhaseSeconds) -> None:
        stats = self.stats
        if plan.has_prefill:
            stats.prefill_seconds += seconds.model
        else:
            stats.decode_seconds += seconds.model
        stats.recompute_seconds += seconds.recompute
        stats.score_seconds += seconds.score
        stats.compact_seconds += seconds.compact
