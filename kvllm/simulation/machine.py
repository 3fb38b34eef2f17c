"""A simulated machine: the real scheduler, and an executor that says how long each of its steps takes."""

from __future__ import annotations

from kvllm.config import EngineConfig
from kvllm.core.capacity import tail_start
from kvllm.core.protocol import SampledToken, StepPlan, StepResult
from kvllm.core.scheduler import Scheduler
from kvllm.core.sequence import ANONYMOUS, Sequence, ServiceClass
from kvllm.sampling_params import SamplingParams
from kvllm.simulation.cost import CostModel
from kvllm.simulation.executor import SimulatedExecutor
from kvllm.simulation.workload import Lengths
from kvllm.stats import EngineStats

GREEDY = SamplingParams(temperature=0)


class SimulatedMachine:
    """Takes steps, each in two calls: `begin_step` plans and executes it, `end_step` gives its tokens.

    recalled_pairs: see `simulate`.
    """

    def __init__(self, config: EngineConfig, cost: CostModel, recalled_pairs: float | None = None) -> None:
        self.config = config
        self.stats = EngineStats(num_blocks=config.num_blocks)
        self.scheduler = Scheduler(config, self.stats)
        self.executor = SimulatedExecutor(cost, config, recalled_pairs)
        self._launched: StepPlan | None = None  # the step that was planned ahead
        self._running: tuple[StepPlan, StepResult] | None = None

    @property
    def has_work(self) -> bool:
        return self._launched is not None or self.scheduler.has_unfinished

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises RequestError if it does not fit the pool."""
        self.scheduler.longest_of(seq)
        self.scheduler.add(seq)

    def begin_step(self) -> float:
        """The seconds that the next step takes."""
        before = self.executor.seconds.total
        self.executor.planned_ahead = self._launched is not None
        plan = self._launched or self.scheduler.schedule()
        self.scheduler.advance(plan)
        self._launched = self._plan_ahead()
        self._running = plan, self.executor.execute(plan)
        return self.executor.seconds.total - before

    def end_step(self) -> list[tuple[Sequence, SampledToken]]:
        """The sequences that the step has given a token. Those that have all of their tokens leave the scheduler."""
        assert self._running
        sampled = self.scheduler.receive(*self._running)
        for seq, _ in sampled:
            if seq.num_tokens == seq.max_length:
                self.scheduler.finish(seq)
        return sampled

    def _plan_ahead(self) -> StepPlan | None:
        """The step after one that runs. What arrives meanwhile joins the one after it."""
        if not self.config.async_scheduling or self.scheduler.waits_for_loads:
            return None
        self.scheduler.finish_longest()
        return self.scheduler.schedule() if self.scheduler.has_unfinished else None


def new_sequence(
    config: EngineConfig,
    seq_id: int,
    token_ids: list[int],
    lengths: Lengths,
    service_class: ServiceClass = ANONYMOUS,
) -> Sequence:
    """A request that ends with so many tokens, whatever they are. token_ids: its prompt, and any output so far."""
    prompt, output = lengths
    seq = Sequence(
        seq_id,
        str(seq_id),
        token_ids,
        GREEDY,
        max_length=prompt + output,
        tail_start=tail_start(config, prompt),
        service_class=service_class,
    )
    seq.prompt_length = prompt
    return seq
