"""Blocks for the KV pool of a GPU: memory that the largest steps leave. These are run to find out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from msgspec.structs import replace

from kvllm.compression.queries import window_tokens
from kvllm.config import EngineConfig
from kvllm.core.protocol import (
    BlockTransfer,
    CompressionJob,
    Decodes,
    Load,
    PartJob,
    PrefillChunk,
    ScoringStart,
    SequenceStart,
    StepPlan,
    Verification,
)
from kvllm.core.regions import Region
from kvllm.core.tables import TableStart
from kvllm.errors import ConfigError
from kvllm.kvcache.groups import full_groups
from kvllm.sampling_params import SamplingParams
from kvllm.worker.forward_pass import ForwardPass
from kvllm.worker.graphs import cuda_capture
from kvllm.worker.model_runner import ModelRunner

GIB = 1 << 30
DRIVER_PIECE = 2 << 20
"""Bytes in which a driver takes memory: a graph that fits into a piece which is there already shows none."""
SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.1, allowed_token_ids=[0])
"""The kind that takes most memory: logits are copied before they are changed."""
LEAST_LOGPROBS = 20


def fitting_blocks(
    probe: ModelRunner, config: EngineConfig, utilization: float, graph_stream: torch.cuda.Stream | None
) -> int:
    """Blocks that fit beside the model and all that a step needs.

    Args:
        probe: a runner on the GPU whose cache has one block; what else it holds, the real one will hold too.
        utilization: share of the GPU's memory that may be in use, whoever uses it.
        graph_stream: that graphs will be captured on. None: there are none.

    Raises:
        ConfigError: not a single block fits, or not even a step.
    """
    take_workspaces(probe.device, graph_stream)
    # Both at once: transfers have streams of their own, and those of a disk a thread.
    step_bytes = _peak(lambda: run_heaviest_steps(probe, config)) + _peak(lambda: run_largest_transfers(probe))
    block_bytes, graph_bytes = probe.bytes_per_block, 0
    in_use, total = _bytes_in_use(probe)
    left = int(total * utilization) - in_use - step_bytes
    if graph_stream and left > block_bytes:
        with enough_memory("what CUDA graphs need", "set enforce_eager=True"):
            graph_bytes = measure_graphs(probe, left // block_bytes, graph_stream)
    kept = _bytes_in_use(probe)[0] - in_use  # by libraries and the driver, of graphs that are gone
    blocks = (left - graph_bytes - max(kept, 0)) // block_bytes
    if blocks < 1:
        raise ConfigError(
            f"gpu_memory_utilization={utilization} leaves no memory for the KV pool: of {total / GIB:.1f} GiB, "
            f"{in_use / GIB:.1f} are in use once the model is loaded, steps take {step_bytes / GIB:.1f} "
            f"and CUDA graphs {graph_bytes / GIB:.1f} more. Raise it, lower max_num_batched_tokens, "
            "max_num_seqs or max_model_len, share the model among GPUs with tensor_parallel_size, "
            "or end what else uses this one"
        )
    return blocks


@contextmanager
def enough_memory(what: str, remedy: str) -> Iterator[None]:
    """Raises ConfigError, with what was going on and what helps, when a GPU's memory does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise ConfigError(
            f"{what} does not fit on the GPU, which has {free / GIB:.1f} of {total / GIB:.1f} GiB free: {remedy}, or "
            "share the model among GPUs with tensor_parallel_size, or end what else uses this one"
        ) from error


def take_workspaces(device: torch.device, graph_stream: torch.cuda.Stream | None) -> None:
    """Let cuBLAS take all memory that it will, which is not a step's, and not a graph's.

    It has a workspace for each thread and stream, taken with the first product there, and kept. The thread that builds
    an engine is not always the one that steps it; one that ends leaves its own to the next.
    """

    def multiply(stream: torch.cuda.Stream | None = None) -> None:
        with torch.cuda.stream(stream):
            matrix = torch.zeros(1, 1, device=device)
            torch.mm(matrix, matrix)

    multiply()
    multiply(graph_stream)
    with ThreadPoolExecutor(1) as another:
        another.submit(multiply).result()


@torch.inference_mode()
def measure_graphs(probe: ModelRunner, num_blocks: int, stream: torch.cuda.Stream) -> int:
    """Bytes of the GPU that the graphs of all sizes take, of the model and of one that drafts."""
    return sum(_measure_graphs(probe, forward_pass, num_blocks, stream) for forward_pass in probe.recorded)


def _measure_graphs(probe: ModelRunner, forward_pass: ForwardPass, num_blocks: int, stream: torch.cuda.Stream) -> int:
    """Of one model: two are captured here and given up again.

    The largest one comes first and brings what the others share; each of these takes what the second one does. That is
    seen from outside: torch knows its kernels' memory, but not what the driver keeps of a graph.
    """
    before = _bytes_in_use(probe)[0]
    forward_pass.use_graphs(cuda_capture(stream), num_blocks, largest_alone=True)
    if forward_pass.graphs is None:
        return 0
    between, others = _bytes_in_use(probe)[0], forward_pass.graphs.sizes.all()[1:]
    forward_pass.graphs.capture(others[:1])
    first, second = between - before, _bytes_in_use(probe)[0] - between
    forward_pass.graphs = None
    return max(first, 0) + len(others) * max(second, DRIVER_PIECE)


def _bytes_in_use(probe: ModelRunner) -> tuple[int, int]:
    """Of the GPU, by whoever uses it, and all that it has."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(probe.device)
    return total - free, total


def run_heaviest_steps(runner: ModelRunner, config: EngineConfig) -> None:
    """Execute plans that need as much memory as any that the scheduler makes. All their KV pairs go to block 0.

    Raises ConfigError if there is too little of it.
    """
    for tensor in runner.cache.tensors:
        tensor[:, :, 0] = 0
    tokens, seqs, length = config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len
    what = f"a step of max_num_batched_tokens={tokens}, max_num_seqs={seqs} and max_model_len={length}"
    with enough_memory(what, "lower these"):
        # One sequence alone has log probabilities of most tokens of its prompt computed at once. Zeros teach nothing.
        passes = (*_prefill(config, seqs), *_prefill(config, 1), *_verification(config))
        for plan in (*passes, *_events(config), StepPlan(reset=True)):
            runner.execute(plan)


def run_largest_transfers(runner: ModelRunner) -> None:
    """Let as many blocks as go to the host at once go there, if any do, and come back."""
    if runner.store is None:
        return
    most = runner.store.outgoing.most
    transfer = BlockTransfer([0] * most, [0] * most)
    with enough_memory("a transfer to the host", "do without kv_offloading_size"):
        for plan in (StepPlan(stores=[transfer]), StepPlan(loads=[Load(0, transfer)]), StepPlan(reset=True)):
            runner.execute(plan)


def _prefill(config: EngineConfig, num_seqs: int) -> Iterator[StepPlan]:
    """As many tokens as a step can have, of so many sequences that sample, with the widest block tables: what attention
    writes for each part of a table grows with the longest one, for all sequences. Their scores are added up, if that is
    how windows are scored."""
    num_tokens = min(config.max_num_batched_tokens // num_seqs, config.max_model_len - 1)
    lengths = [config.max_model_len - 1] + [num_tokens] * (num_seqs - 1)
    yield StepPlan(
        new_seqs=[_start(i, n - num_tokens, n, config, room=n) for i, n in enumerate(lengths)],
        scored=_scored(config, range(len(lengths))),
        chunks=[PrefillChunk(i, num_tokens, [], True) for i in range(len(lengths))],
    )
    yield StepPlan(dropped_seq_ids=list(range(num_seqs)))


def _verification(config: EngineConfig) -> Iterator[StepPlan]:
    """As many query tokens as a step can have, each with logits: drafts of as many sequences."""
    if not config.most_drafts:
        return
    num_tokens = min(1 + config.most_drafts, config.max_num_batched_tokens, config.max_model_len - 1)
    seq_ids = range(min(config.max_num_seqs, config.max_num_batched_tokens // num_tokens))
    yield StepPlan(
        new_seqs=[_start(i, 1, 1, config, room=1 + num_tokens) for i in seq_ids],
        scored=_scored(config, seq_ids),
        verifications=[Verification(i, [0] * num_tokens, []) for i in seq_ids],
    )
    yield StepPlan(dropped_seq_ids=[*seq_ids])


def _scored(config: EngineConfig, seq_ids: range) -> list[ScoringStart]:
    """Sequences whose scores are added up from their first KV pair on, if that is how windows are scored."""
    observes = config.active_compression is not None and config.active_compression.spec.reselects
    return [ScoringStart(seq_id, 0) for seq_id in seq_ids if observes]


def _events(config: EngineConfig) -> Iterator[StepPlan]:
    """Compression events, in the sequences' caches of zeros: of as many windows as go into a step, and of one sequence
    as long as any. A prompt is computed whole before it is compressed, and what is chosen from may be all of it."""
    compression = config.active_compression
    if compression is None:
        return
    regions, longest = compression.regions(config.block_size), config.max_model_len - 1
    length = regions.next_end(0, 0)
    region, largest = regions.complete(length, length), regions.complete(longest, longest)
    if region is None or largest is None:
        return  # no sequence gets so long
    num_windows = config.max_num_batched_tokens // window_tokens(compression, region.size)
    yield from _event(config, region, length, min(config.max_num_seqs, max(1, num_windows)))
    yield from _event(config, dataclasses.replace(largest, count=1), longest, 1)


def _event(config: EngineConfig, region: Region, length: int, num_seqs: int) -> Iterator[StepPlan]:
    """A region of each of so many sequences of `length` tokens is compressed."""
    seq_ids = range(num_seqs)
    yield StepPlan(
        new_seqs=[_start(i, length - 1, length, config, room=length + 1) for i in seq_ids],
        chunks=[PrefillChunk(i, 1, [], True) for i in seq_ids],
    )
    parts = list(_parts(region, length + 1, config))
    yield StepPlan(
        compressions=[CompressionJob(i, parts) for i in seq_ids],
        decodes=Decodes([*seq_ids], [0] * len(seq_ids)),
    )
    yield StepPlan(dropped_seq_ids=[*seq_ids])


def _parts(region: Region, room: int, config: EngineConfig) -> Iterator[PartJob]:
    """A region of a cache that was never compressed, in each part that attends all tokens. The tables, which have room
    for `room` KV pairs, have it for as many more tokens afterwards."""
    first, end = region.start // config.block_size, -(-room // config.block_size)
    for group in full_groups(config.kv_groups):
        kept = region.retain if group.retain_blocks is None else group.retain_blocks * config.block_size
        left = -(-(room - region.count * (region.size - kept)) // config.block_size)
        job = PartJob(first, region.count, region.size, kept, region.stride, end - first, [0] * (left - first))
        yield from [job] * len(group.parts)


def _start(seq_id: int, computed: int, length: int, config: EngineConfig, room: int) -> SequenceStart:
    """A sequence of `length` tokens, of which some are computed, with tables for `room` tokens."""
    tables, size = [], config.block_size
    for group in config.kv_groups:
        first = group.first_block(computed, size)
        tables += [TableStart(first * size, [0] * (-(-room // size) - first))] * len(group.parts)
    most = max(config.max_logprobs, LEAST_LOGPROBS)
    sampling = replace(SAMPLING, logprobs=most, prompt_logprobs=most)
    return SequenceStart(seq_id, [0] * length, length, computed, sampling, seq_id, tables=tables)


def _peak(run: Callable[[], None]) -> int:
    """Bytes that are allocated at once while something runs, beyond those before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
