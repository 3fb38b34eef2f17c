"""Faults that the simulation must find: each is put into the engine for a while."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from kvllm.core.block_pool import BlockPool
from kvllm.core.engine import LLMEngine
from kvllm.core.offloading import Offloading
from kvllm.core.output_processor import OutputProcessor
from kvllm.core.output_stream import OutputStream
from kvllm.core.protocol import StepPlan, StepResult, TransferReport
from kvllm.core.sequence import Sequence
from kvllm.core.tables import BlockTable
from kvllm.distributed.replicas.crowding import Crowding
from kvllm.distributed.replicas.engine import DataParallelEngine

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
    )
}
