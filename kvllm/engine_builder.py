"""The one place where an engine is put together: model, tokenizer, KV pool, and workers or replicas."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from kvllm.compression.specs import AUTO, FROM_ALL
from kvllm.config import EngineConfig, host_room, require
from kvllm.core.capacity import check_pool, longest_blocks
from kvllm.core.drafting.step_cost import measure_steps
from kvllm.core.engine import LLMEngine
from kvllm.engine_args import EngineArgs
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape
from kvllm.lora.files import Adapters
from kvllm.models.config import EXPANDED, ModelConfig
from kvllm.parallel import SingleRank
from kvllm.structured.checker import GrammarChecker
from kvllm.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from kvllm.worker import host_memory
from kvllm.worker.adapter_weights import adaptable_shapes
from kvllm.worker.build import (
    Loaded,
    RunnerSettings,
    available_memory,
    check_runner,
    draft_block_bytes,
    make_grammars,
    make_runner,
    rank_cache_shape,
)
from kvllm.worker.features import bytes_beside_pool
from kvllm.worker.features.offloading import host_block_bytes
from kvllm.worker.features.recall import host_chunk_bytes
from kvllm.worker.inline import make_executor
from kvllm.worker.threads import set_up_threads

if TYPE_CHECKING:  # a single process needs neither these nor Ray
    from kvllm.distributed.executor import RayExecutor
    from kvllm.distributed.replicas.engine import DataParallelEngine
    from kvllm.distributed.replicas.replica_set import ReplicaSet

    Engine = LLMEngine | DataParallelEngine

logger = logging.getLogger(__name__)

MIB, GIB = 1 << 20, 1 << 30
AUTO_COSTS = {FROM_ALL: ": in a quarter of the bytes SmolLM2-135M loses 0.087 nats, by lot 0.149"}
"""What docs/accuracy.md has measured on real models of a method that `method="auto"` may choose."""


def build_engine(args: EngineArgs) -> Engine:
    """Load the tokenizer and the model, in this process or on Ray's workers, and put an engine around them.

    Raises:
        ConfigError, CheckpointError: before any weights are read, wherever that can be known.
    """
    set_up_threads()
    if args.pooling:
        raise ConfigError(
            f'{args.path} is run for embeddings, scores or classes: use LLM, or kvllm serve, or give runner="generate"'
        )
    config, shape = args.engine_config, cache_shape(args)
    of_drafts = draft_block_bytes(args.draft.model_config, cache_shape(args.draft)) if args.draft else 0
    block_bytes = shape.bytes_per_block + of_drafts
    tokenizer = read_tokenizer(args)
    args.fetch_weights()
    with ExitStack() as started:  # ended here unless all goes well
        workers = _start_workers(args) if args.uses_ray else None
        if workers:
            started.callback(workers.close)
        device = workers.device if workers else local_device(args)
        check_device(args, device)
        if device == "cuda" and config.recalls:
            raise ConfigError(
                "recall_period and recall_bound exchange KV pairs in the attention of a CPU only, not on a GPU: leave "
                'them out, or give device="cpu"'
            )
        free = workers.available_memory if workers else available_memory(device, 1)
        config = _with_room_for_states(args, config, shape, free)
        beside = bytes_beside_pool(config, shape)
        measures = device == "cuda" and args.num_gpu_blocks_override is None and args.kv_cache_memory_bytes is None
        if not measures:
            num_blocks = _num_blocks(args, config.num_blocks, block_bytes, sum(beside.values()), free)
            config = structs.replace(config, num_blocks=num_blocks)
        num_host_blocks, num_host_chunks = _host_room(args, config, shape)
        config = structs.replace(
            config,
            num_host_blocks=num_host_blocks,
            num_host_chunks=num_host_chunks,
            async_scheduling=device == "cuda" if args.async_scheduling is None else args.async_scheduling,
        )
        if args.max_model_len is not None:
            check_pool(config)
        settings = runner_settings(args, config, tokenizer, args.gpu_memory_utilization if measures else None)
        load = partial(_load_on, workers, args) if workers else partial(_load_here, device, args)
        engine, loaded = load(settings, tokenizer)
        if args.max_model_len is not None:
            check_pool(engine.config)  # of the size that was found
        if isinstance(engine, LLMEngine) and args.kv_offloading_path is not None:
            engine.step()  # by which it learns what is on the disk
        engine.stats.block_bytes = shape.bytes_per_block
        engine.stats.draft_pool_bytes = of_drafts * engine.config.num_blocks * args.data_parallel_size
        engine.stats.num_host_blocks = config.num_host_blocks * args.data_parallel_size
        for field, size in beside.items():
            setattr(engine.stats, field, size * args.data_parallel_size)
        _log(args, settings, engine, device, loaded)
        started.pop_all()
    return engine


def check_device(args: EngineArgs, device: str) -> None:
    """Raise ConfigError for weights that a device does not compute with."""
    if args.draft:
        check_device(args.draft, device)
    if device == "cuda" and args.quantization not in (None, EXPANDED):
        raise ConfigError(f"quantization={args.quantization!r} is computed on a CPU only: leave it out on a GPU")
    form = args.model_config.weight_format
    if device == "cuda" and form and form.integers:
        raise ConfigError(
            f"{args.path} has weights of integers ({form.method}), which are computed on a CPU only: use a "
            'checkpoint of floating point, or device="cpu"'
        )


def check_engine(args: EngineArgs) -> None:
    """Find out whether an engine of one rank can be, without its weights.

    Raises:
        ConfigError, CheckpointError: as `build_engine`.
    """
    settings = runner_settings(args, args.engine_config)
    check_runner(settings, SingleRank(), torch.device(local_device(args)))


def runner_settings(
    args: EngineArgs,
    config: EngineConfig,
    tokenizer: Tokenizer | None = None,
    utilization: float | None = None,
) -> RunnerSettings:
    """What a rank loads its shard with. utilization: as gpu_memory_utilization there."""
    return RunnerSettings(
        str(args.path.absolute()),  # links stay: in a hub's cache, they alone have the names of files
        _with_eos_tokens(args.model_config, tokenizer),
        config,
        dtype_of(args),
        args.attention_backend,
        args.load_format,
        args.enforce_eager,
        utilization,
        args.quantization,
        str(args.tokenizer_path.absolute()),
        runner_settings(args.draft, args.draft.engine_config) if args.draft else None,
    )


def cache_shape(args: EngineArgs) -> CacheShape:
    """Sizes of what one rank stores for each token."""
    return rank_cache_shape(args.model_config, dtype_of(args), args.engine_config, args.tensor_parallel_size)


def local_device(args: EngineArgs) -> str:
    """The device type of this process, "cuda" or "cpu". Raises ConfigError if there is no such device."""
    available = torch.cuda.is_available()
    allowed = 'torch finds no GPU here: use "auto" or "cpu"'
    require(available or args.device != "cuda", "device", args.device, allowed)
    return args.device if args.device != "auto" else "cuda" if available else "cpu"


def _with_eos_tokens(model: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """The model, whose texts end at the tokens that its tokenizer names, too."""
    named = () if tokenizer is None else tokenizer.eos_token_ids
    known = (token_id for token_id in named if token_id < model.vocab_size)
    return structs.replace(model, eos_token_ids=tuple(dict.fromkeys((*model.eos_token_ids, *known))))


def dtype_of(args: EngineArgs) -> str:
    """The name of the type that weights, activations and KV pairs have."""
    asked = args.model_config.dtype if args.dtype == "auto" else args.dtype
    return "float32" if asked == "float16" and local_device(args) == "cpu" else asked


def read_tokenizer(args: EngineArgs) -> Tokenizer | None:
    """None if the checkpoint has none. One that was asked for must be there."""
    if args.tokenizer is None and not has_tokenizer(args.path):
        return None
    return load_tokenizer(args.tokenizer_path)


# Workers


def _start_workers(args: EngineArgs) -> RayExecutor | ReplicaSet:
    num_ranks, num_replicas = args.tensor_parallel_size, args.data_parallel_size
    try:
        from kvllm.distributed.executor import RayExecutor
        from kvllm.distributed.replicas.replica_set import ReplicaSet
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} with data_parallel_size={num_replicas} on several processes needs Ray, "
            'which is not installed: pip install "kvllm[ray]" (or: pip install ray), or leave both at 1'
        ) from error
    if num_replicas > 1:
        return ReplicaSet(num_replicas, num_ranks, args.placement_strategy, args.max_worker_restarts, args.device)
    return RayExecutor(num_ranks, args.placement_strategy, args.max_worker_restarts, device=args.device)


def _load_on(
    workers: RayExecutor | ReplicaSet, args: EngineArgs, settings: RunnerSettings, tokenizer: Tokenizer | None
) -> tuple[Engine, Loaded]:
    """Let the workers load the model, and learn how many blocks there are."""
    from kvllm.distributed.replicas.engine import DataParallelEngine
    from kvllm.distributed.replicas.replica_set import ReplicaSet

    loaded = workers.load(settings)
    config = structs.replace(settings.engine, num_blocks=loaded.num_blocks)
    checker = GrammarChecker(make_grammars(settings), samples_here=False)
    options = _request_options(args, settings, tokenizer, checker)
    if isinstance(workers, ReplicaSet):
        return DataParallelEngine(config, workers, **options), loaded
    step_cost = measure_steps(workers, config, settings.model.vocab_size) if config.speculation else None
    return LLMEngine(config, workers, **options, step_cost=step_cost), loaded


def _load_here(
    device: str, args: EngineArgs, settings: RunnerSettings, tokenizer: Tokenizer | None
) -> tuple[Engine, Loaded]:
    """Load the model in this process, and learn how many blocks there are."""
    runner = make_runner(settings, SingleRank(), torch.device(device))
    loaded = Loaded.of(settings, runner)
    config = structs.replace(settings.engine, num_blocks=loaded.num_blocks)
    assert runner.grammars is not None
    checker = GrammarChecker(runner.grammars, samples_here=True)
    executor = make_executor(runner, async_scheduling=config.async_scheduling)
    step_cost = measure_steps(executor, config, settings.model.vocab_size) if config.speculation else None
    options = _request_options(args, settings, tokenizer, checker)
    return LLMEngine(config, executor, **options, step_cost=step_cost), loaded


def _request_options(
    args: EngineArgs, settings: RunnerSettings, tokenizer: Tokenizer | None, grammars: GrammarChecker
) -> dict[str, Any]:
    """The parts of an engine that read requests and end them."""
    model = settings.model
    return {
        "vocab_size": model.vocab_size,
        "eos_token_ids": model.eos_token_ids,
        "tokenizer": tokenizer,
        "grammars": grammars,
        "adapters": Adapters(adaptable_shapes(model), args.max_lora_rank) if args.enable_lora else None,
    }


# Memory


def _with_room_for_states(args: EngineArgs, config: EngineConfig, shape: CacheShape, free: int) -> EngineConfig:
    """Where layers hold a state for each sequence, so many sequences at once, and copies of states for prefixes, that
    these take half of the memory that the pool would have alone."""
    if shape.recurrent is None:
        return config
    size, memory = shape.recurrent.bytes_per_sequence, args.kv_cache_memory_bytes or min(4 * GIB, free // 2)
    least = f"at least {4 * size}: a sequence holds {size} bytes in recurrent layers, beside its KV pairs"
    require(memory >= 4 * size, "kv_cache_memory_bytes", memory, least)
    rows = memory // 2 // size - 1
    most = min(config.max_num_seqs, rows - rows // 4)
    snapshots = min(rows - most, 2 * most) if config.enable_prefix_caching else 0
    if most < config.max_num_seqs:
        _log_fewer_sequences(config, most, size)
    return structs.replace(config, max_num_seqs=most, num_state_snapshots=snapshots)


def _log_fewer_sequences(config: EngineConfig, most: int, size: int) -> None:
    logger.info(
        "at most %d sequences run at once instead of max_num_seqs=%d: each holds %.1f MiB in recurrent layers, which "
        "take half of the memory of KV pairs. kv_cache_memory_bytes gives more",
        most,
        config.max_num_seqs,
        size / MIB,
    )


def _num_blocks(args: EngineArgs, most_useful: int, block_bytes: int, state_bytes: int, free: int) -> int:
    """Blocks in the pool: as many as were asked for, or as go into half of the memory that is free.

    state_bytes: memory beside the pool, for the compression method and for recent KV pairs; it counts as memory of the
        pool.
    """
    blocks, memory = args.pool_blocks, args.kv_cache_memory_bytes
    if blocks is not None:
        field, value = "num_gpu_blocks_override", args.num_gpu_blocks_override
    elif memory is not None:
        field, value, blocks = "kv_cache_memory_bytes", memory, (memory - state_bytes) // block_bytes
        least = f"at least one block of {args.block_size} tokens, {block_bytes} bytes"
        if state_bytes:
            least += f", beside {state_bytes} bytes for the method and kv_residual_tokens: lower max_num_seqs or "
            least += "max_model_len to shrink these"
        require(blocks >= 1, field, value, least)
    else:
        return max(1, min(most_useful, (min(4 * GIB, free // 2) - state_bytes) // block_bytes))
    needed = blocks * block_bytes + state_bytes
    require(
        needed <= free, field, value, f"it takes {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB of memory are free"
    )
    return blocks


def _host_room(args: EngineArgs, config: EngineConfig, shape: CacheShape) -> tuple[int, int]:
    """Blocks of each rank in host memory, and chunks there for what compressions drop, if it may come back. All ranks
    of an engine together take `kv_offloading_size`."""
    size, num_ranks = args.host_size, args.tensor_parallel_size
    if size is None:
        return 0, 0
    block_bytes = host_block_bytes(config, shape) * num_ranks
    chunk_bytes = host_chunk_bytes(config, shape) * num_ranks if config.recalls else None
    room = host_room(size, args.block_size, block_bytes, chunk_bytes)
    on_disk = args.kv_offloading_disk_size
    least = f"at least a block of {args.block_size} tokens, {block_bytes / GIB:.2g} GiB"
    has_room = args.kv_offloading_path is None or on_disk * GIB >= block_bytes
    require(has_room, "kv_offloading_disk_size", on_disk, least)
    free = host_memory.available_memory() / GIB
    allowed = f"{free:.1f} GiB of this machine's memory are free"
    require(size <= free, "kv_offloading_size", size, allowed)
    return room


# Log


def _log(args: EngineArgs, settings: RunnerSettings, engine: Engine, device: str, loaded: Loaded) -> None:
    """Say in a line what was started, and what is wrong with it."""
    config, num_ranks = engine.config, args.tensor_parallel_size * args.data_parallel_size
    logger.info(
        "%s (%s, %s) on %s%s; attention backend %s; KV pool of %d blocks of %d tokens%s, %s MiB%s; %s",
        args.name,
        settings.model.architecture,
        settings.dtype,
        device,
        f", {num_ranks} ranks on Ray" if args.uses_ray else "",
        loaded.attention_backend,
        config.num_blocks,
        config.block_size,
        "" if config.kv_cache_dtype == "auto" else f" in {config.kv_cache_dtype}",
        f"{config.num_blocks * cache_shape(args).bytes_per_block / MIB:,.1f}",
        " for each rank" if num_ranks > 1 else "",
        _compression(args, settings),
    )
    if loaded.weights:
        logger.info("%s: %s", args.name, loaded.weights)
    if engine.outputs.tokenizer is None:
        logger.warning(
            "%s has no tokenizer: prompts must be token ids and outputs have no text, so that chats, stop strings and "
            "structured outputs are refused; add its tokenizer.json or tokenizer.model",
            args.path,
        )
    if args.dtype == "float16" and settings.dtype == "float32":
        logger.warning("dtype='float16' is not computed on a CPU: it runs as float32")
    for warning in loaded.warnings:
        logger.warning(warning)
    if (blocks := longest_blocks(config)) > config.num_blocks:
        logger.warning(
            "the KV pool has %d blocks of %d tokens, and a sequence of max_model_len=%d needs %d: longer ones than fit "
            "are refused. Raise kv_cache_memory_bytes or num_gpu_blocks_override, or set max_model_len",
            config.num_blocks,
            config.block_size,
            config.max_model_len,
            blocks,
        )


def _compression(args: EngineArgs, settings: RunnerSettings) -> str:
    compression = settings.engine.compression
    if compression is None or args.compression is None:
        return "no compression"
    chosen = f" (method=auto{AUTO_COSTS.get(compression.method, '')})" if args.compression.method == AUTO else ""
    kept = {group.retain_blocks for group in compression.named_groups}
    shares = f", layers keep {min(kept)} to {max(kept)} of {compression.policy.window_blocks} blocks" if kept else ""
    return f"compression by {compression.method}{chosen}, {compression.policy.name}{shares}"
