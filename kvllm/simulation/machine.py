"""A simulated machine: the real scheduler, and an executor that says how long each of its steps takes."""

from __future__ import annotations

from kvllm.config import EngineConfig
from kvllm.core.capacity import tail_start
from kvllm.core.protocol import SampledToken, StepPlan, StepResult
from kvllm.core.scheduler import Scheduler
from kvllm.core.sequence import ANONYMOUS, Sequence, ServiceClass
from kvllm.sampling_params import SamplingParams
from kvllm.simulation.cost import CostModel
from kvllm.simulation.executor import TOKEN, SimulatedExecutor
from kvllm.simulation.workload import Lengths
from kvllm.stats import EngineStats

GREEDY = SamplingParams(temperature=0)
MOST_SKIPPED = 64


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
        compression = config.active_compression
        on_demand = compression is None or (compression.policy.name == "pressure" and not compression.spec.reselects)
        uniform = self.scheduler.blocks.is_uniform and not self.executor.windows
        self._may_skip = on_demand and uniform and not config.speculation
        # Blocks count as short when those of so many steps are missing.
        self._foresight = compression.policy.period if compression and on_demand else 0

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

    def skip(self, seconds: float) -> list[float]:
        """Take at once the next steps that end within `seconds`, as long as the scheduler has nothing to decide: all
        that runs decodes, nothing waits or ends, and there are blocks for all. Returns the seconds of each; in all of
        them each running sequence gets a token."""
        running, blocks, ahead = self.scheduler.running, self.scheduler.blocks, int(self._launched is not None)
        if not self._is_steady():
            return []
        most = min(MOST_SKIPPED, *(seq.max_length - seq.num_tokens - 1 for seq in running))
        needed = sum(blocks.blocks_to_append(seq, most + ahead + self._foresight) for seq in running)
        if most <= 0 or needed > blocks.num_available:
            return []
        self.executor.planned_ahead = bool(ahead)
        steps = self.executor.decode_steadily([seq.seq_id for seq in running], most, seconds)
        if steps:
            for seq in running:
                blocks.append(seq, len(steps) + ahead)
                seq.token_ids += [TOKEN.token_id] * len(steps)
                seq.known_tokens += len(steps)
                seq.advance(len(steps))
                if seq.logical_length >= seq.settles_at:
                    blocks.settle(seq, prefilled=False)
        return steps

    def _is_steady(self) -> bool:
        """Whether the next step only decodes what runs, and nothing that lies ahead is decided by more than room."""
        scheduler, plan = self.scheduler, self._launched
        if not self._may_skip or not scheduler.running or scheduler.waiting or scheduler.waits_for_loads:
            return False
        if plan is None:
            return all(seq.is_decoding for seq in scheduler.running)
        return plan.num_seqs == len(plan.decodes.seq_ids) == len(scheduler.running)

    def _plan_ahead(self) -> StepPlan | None:
        """The step after one that runs. What arrives meanwhile joins the one after it."""
        if not self.config.async_scheduling or self.scheduler.waits_for_loads:
            return None
        self.scheduler.finish_longest()
        return self.scheduler.schedule() if self.scheduler.has_unfinished else None


def new_sequence(
    config: EngineConfig, seq_id: int, token_ids: list[int], lengths: Lengths, service_class: ServiceClass = ANONYMOUS
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
