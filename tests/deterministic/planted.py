"""Faults that the simulation must find: each is put into the engine for a while."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from kvllm.core import block_manager
from kvllm.core.block_pool import BlockPool
from kvllm.core.engine import LLMEngine
from kvllm.core.offloading import Offloading
from kvllm.core.output_processor import OutputProcessor
from kvllm.core.output_stream import OutputStream
from kvllm.core.prefix_cache import root_hash
from kvllm.core.protocol import PromptLogprobs, StateCopy, StepPlan, StepResult, TransferReport
from kvllm.core.request import Request
from kvllm.core.sequence import Sequence
from kvllm.core.state_snapshots import StateSnapshots
from kvllm.core.tables import BlockTable
from kvllm.distributed.replicas.dispatcher import Crowding
from kvllm.distributed.replicas.engine import DataParallelEngine
from kvllm.serving.supervisor import EngineSupervisor
from kvllm.structured.matcher import Matcher

Plant = Callable[[], AbstractContextManager[Any]]


def block_released_early() -> AbstractContextManager[Any]:
    compact = BlockTable.compact

    def hasty(table: BlockTable, *arguments: int) -> list[int]:
        destinations = compact(table, *arguments)
        table.pool.release(destinations[-1:])
        return destinations

    return patch.object(BlockTable, "compact", hasty)


def hash_kept_after_a_compaction() -> AbstractContextManager[Any]:
    return patch.object(BlockPool, "forget", lambda pool, blocks: None)


def no_copy_on_write() -> AbstractContextManager[Any]:
    return patch.object(BlockTable, "_writes_shared", lambda table, length: False)


def lost_wake_up() -> AbstractContextManager[Any]:
    announce = OutputStream._announce

    def forgetful(stream: OutputStream) -> bool:
        return announce(stream) and not (stream._published and stream._published.finished)

    return patch.object(OutputStream, "_announce", forgetful)


def stale_plan_after_an_exception() -> AbstractContextManager[Any]:
    def recover(engine: LLMEngine) -> None:
        engine.scheduler.reset(engine.outputs.restore())

    return patch.object(LLMEngine, "_recover", recover)


def token_twice_after_an_exception() -> AbstractContextManager[Any]:
    restore = OutputProcessor.restore

    def stale(outputs: OutputProcessor) -> list[Sequence]:
        sequences = restore(outputs)
        for seq in sequences[:1]:
            if seq.num_generated:
                seq.extend(seq.token_ids[-1:])
        return sequences

    return patch.object(OutputProcessor, "restore", stale)


def off_by_one_in_a_swap() -> AbstractContextManager[Any]:
    load = Offloading.load

    def shifted(offloading: Offloading, seq: Sequence, hit: Any) -> None:
        load(offloading, seq, hit)
        host_blocks = offloading._plan.loads[-1].transfer.host_blocks
        host_blocks.append(host_blocks.pop(0))

    return patch.object(Offloading, "load", shifted)


def lost_blocks_taken() -> AbstractContextManager[Any]:
    update = Offloading.update

    def trusting(offloading: Offloading, plan: StepPlan, result: StepResult) -> None:
        loaded = [*result.transfers.loaded, *result.transfers.lost]
        result.transfers = TransferReport(loaded, [], 0, 0.0, result.transfers.on_disk)
        update(offloading, plan, result)

    return patch.object(Offloading, "update", trusting)


def share_of_a_tenant_not_returned() -> AbstractContextManager[Any]:
    return patch.object(Crowding, "remove", lambda crowding, replica, seq: None)


def late_result_taken() -> AbstractContextManager[Any]:
    def recover(engine: DataParallelEngine) -> None:
        for replica in range(len(engine.replicas.num_blocks)):
            engine.replicas.drop(replica, engine.dispatcher.sent(replica))
        engine.dispatcher.reset(engine.outputs.restore())  # under the ids that they had

    return patch.object(DataParallelEngine, "_recover", recover)


def state_of_another_prefix() -> AbstractContextManager[Any]:
    return patch.object(StateSnapshots, "row", lambda snapshots, digest: next(reversed(snapshots._row_of.values())))


def state_copied_a_step_late() -> AbstractContextManager[Any]:
    take_due = StateSnapshots.take_due
    late: dict[StateSnapshots, list[StateCopy]] = {}

    def take_late(snapshots: StateSnapshots) -> list[StateCopy]:
        due, late[snapshots] = late.get(snapshots, []), take_due(snapshots)
        return due

    return patch.object(StateSnapshots, "take_due", take_late)


def grammar_of_two_completions() -> AbstractContextManager[Any]:
    return patch.object(Matcher, "branch", lambda matcher: matcher)


def prompt_reported_twice_after_an_exception() -> AbstractContextManager[Any]:
    def add(outputs: OutputProcessor, request: Request, prompt: PromptLogprobs) -> list[Sequence]:
        assert request.output.prompt_logprobs is not None
        request.output.prompt_logprobs += [outputs._logprobs(token, request.sampling) for token in prompt.tokens]
        return []

    return patch.object(OutputProcessor, "_add_prompt_logprobs", add)


def dropped_pairs_not_suspended() -> AbstractContextManager[Any]:
    launch = LLMEngine._launch

    def hasty(engine: LLMEngine, plan: StepPlan) -> StepPlan:
        plan.suspended = []
        return launch(engine, plan)

    return patch.object(LLMEngine, "_launch", hasty)


def prefix_of_another_adapter() -> AbstractContextManager[Any]:
    return patch.object(block_manager, "root_hash", lambda salt, dtype, adapter: root_hash(salt, dtype))


def supervisor_that_goes_on_with_a_dead_engine() -> AbstractContextManager[Any]:
    async def restart(supervisor: EngineSupervisor) -> bool:
        return True

    return patch.object(EngineSupervisor, "_restart", restart)


PLANTED: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        block_released_early,
        hash_kept_after_a_compaction,
        no_copy_on_write,
        lost_wake_up,
        stale_plan_after_an_exception,
        token_twice_after_an_exception,
        off_by_one_in_a_swap,
        lost_blocks_taken,
        share_of_a_tenant_not_returned,
        late_result_taken,
        state_of_another_prefix,
        state_copied_a_step_late,
        grammar_of_two_completions,
        prompt_reported_twice_after_an_exception,
        dropped_pairs_not_suspended,
        prefix_of_another_adapter,
        supervisor_that_goes_on_with_a_dead_engine,
    )
}
