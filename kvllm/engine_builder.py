"""The one place where an engine is put together: model, tokenizer, KV pool, and workers or replicas."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import torch
from msgspec import structs

from kvllm.config import require
from kvllm.core.capacity import check_pool
from kvllm.core.drafting.step_cost import measure_steps
from kvllm.core.engine import LLMEngine
from kvllm.core.executor import Executor
from kvllm.engine_args import EngineArgs
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape
from kvllm.lora.files import Adapters
from kvllm.models.config import ModelConfig
from kvllm.parallel import SingleRank
from kvllm.pool_sizes import PoolOptions, PoolSizes, pool_sizes
from kvllm.start_report import report_start
from kvllm.structured.checker import GrammarChecker
from kvllm.tokenizer import Tokenizer, find_tokenizer, tokenizer_of
from kvllm.worker.adapter_weights import adaptable_shapes
from kvllm.worker.build import (
    Loaded,
    RunnerSettings,
    available_memory,
    check_device,
    check_runner,
    draft_block_bytes,
    make_grammars,
    make_runner,
    rank_cache_shape,
)
from kvllm.worker.inline import make_executor
from kvllm.worker.threads import set_up_threads

if TYPE_CHECKING:  # a single process needs neither these nor Ray
    from kvllm.distributed.executor import RayExecutor
    from kvllm.distributed.replicas.engine import DataParallelEngine
    from kvllm.distributed.replicas.replica_set import ReplicaSet

    Engine = LLMEngine | DataParallelEngine


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
    settings, pools, tokenizer = runner_settings(args), pool_options(args), read_tokenizer(args)
    settings = structs.replace(settings, model=_with_eos_tokens(settings.model, tokenizer))
    shape = rank_cache_shape(settings.model, settings.dtype, settings.engine, pools.num_ranks)
    draft_bytes = draft_block_bytes(settings.draft)
    args.fetch_weights()
    with ExitStack() as started:  # ended here unless all goes well
        workers = _start_workers(args) if args.uses_ray else None
        if workers:
            started.callback(workers.close)
        device = workers.device if workers else local_device(args.device)
        check_device(settings, device)
        free = workers.available_memory if workers else available_memory(device, 1)
        sizes = pool_sizes(pools, settings.engine, shape, shape.bytes_per_block + draft_bytes, device, free)
        if args.max_model_len is not None:
            check_pool(sizes.config)
        plans_ahead = device == "cuda" if args.async_scheduling is None else args.async_scheduling
        settings = structs.replace(
            settings,
            engine=structs.replace(sizes.config, async_scheduling=plans_ahead),
            gpu_memory_utilization=args.gpu_memory_utilization if sizes.measured else None,
        )
        load = partial(_load_on, workers) if workers else partial(_load_here, device)
        engine, loaded = load(settings, tokenizer)
        if args.max_model_len is not None:
            check_pool(engine.config)  # of the size that was found
        if isinstance(engine, LLMEngine) and engine.config.kv_offloading_path is not None:
            engine.step()  # by which it learns what is on the disk
        _count_memory(engine, sizes, shape.bytes_per_block, draft_bytes, args.data_parallel_size)
        settings = structs.replace(settings, engine=engine.config)
        report_start(args, settings, device, loaded, shape.bytes_per_block, has_tokenizer=tokenizer is not None)
        started.pop_all()
    return engine


def _count_memory(engine: Engine, sizes: PoolSizes, block_bytes: int, draft_bytes: int, replicas: int) -> None:
    """Tell the statistics how large everything is, on all replicas together. draft_bytes: of a drafter's block."""
    stats = engine.stats
    stats.block_bytes = block_bytes
    stats.draft_pool_bytes = draft_bytes * engine.config.num_blocks * replicas
    stats.num_host_blocks = sizes.config.num_host_blocks * replicas
    for field, size in sizes.beside.items():
        setattr(stats, field, size * replicas)


def check_engine(args: EngineArgs) -> None:
    """Find out whether an engine of one rank can be, without its weights.

    Raises:
        ConfigError, CheckpointError: as `build_engine`.
    """
    check_runner(runner_settings(args), SingleRank(), torch.device(local_device(args.device)))


def runner_settings(args: EngineArgs) -> RunnerSettings:
    """What a rank loads its shard with."""
    return RunnerSettings(
        str(args.path.absolute()),  # links stay: in a hub's cache, they alone have the names of files
        args.model_config,
        args.engine_config,
        dtype_of(args),
        args.attention_backend,
        args.load_format,
        args.enforce_eager,
        quantization=args.quantization,
        tokenizer_path=str(args.tokenizer_path.absolute()),
        draft=runner_settings(args.draft) if args.draft else None,
    )


def pool_options(args: EngineArgs) -> PoolOptions:
    """What was asked of the pools."""
    return PoolOptions(
        args.num_gpu_blocks_override,
        args.pool_blocks,
        args.kv_cache_memory_bytes,
        args.host_size,
        args.tensor_parallel_size,
    )


def cache_shape(args: EngineArgs) -> CacheShape:
    """Sizes of what one rank stores for each token."""
    return rank_cache_shape(args.model_config, dtype_of(args), args.engine_config, args.tensor_parallel_size)


def local_device(asked: str) -> str:
    """The device type of this process, "cuda" or "cpu". asked: `device`. Raises ConfigError if there is none."""
    available = torch.cuda.is_available()
    allowed = 'torch finds no GPU here: use "auto" or "cpu"'
    require(available or asked != "cuda", "device", asked, allowed)
    return asked if asked != "auto" else "cuda" if available else "cpu"


def _with_eos_tokens(model: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """The model, whose texts end at the tokens that its tokenizer names, too."""
    named = () if tokenizer is None else tokenizer.eos_token_ids
    known = (token_id for token_id in named if token_id < model.vocab_size)
    return structs.replace(model, eos_token_ids=tuple(dict.fromkeys((*model.eos_token_ids, *known))))


def dtype_of(args: EngineArgs) -> str:
    """The name of the type that weights, activations and KV pairs have."""
    asked = args.model_config.dtype if args.dtype == "auto" else args.dtype
    return "float32" if asked == "float16" and local_device(args.device) == "cpu" else asked


def read_tokenizer(args: EngineArgs) -> Tokenizer | None:
    """None if the checkpoint has none. One that was asked for must be there."""
    files = args.tokenizer_files
    return find_tokenizer(files) if args.tokenizer is None else tokenizer_of(files)


# Workers


def _start_workers(args: EngineArgs) -> RayExecutor | ReplicaSet:
    num_ranks, num_replicas = args.tensor_parallel_size, args.data_parallel_size
    try:
        from kvllm.distributed.executor import RayExecutor
        from kvllm.distributed.faults import RestartBudget
        from kvllm.distributed.placement import reserve
        from kvllm.distributed.replicas.replica_set import ReplicaSet
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} with data_parallel_size={num_replicas} on several processes needs Ray, "
            'which is not installed: pip install "kvllm[ray]" (or: pip install ray), or leave both at 1'
        ) from error
    places = reserve(num_replicas, num_ranks, args.placement_strategy, args.device)
    budget = RestartBudget(args.max_worker_restarts)
    return ReplicaSet(places, budget) if num_replicas > 1 else RayExecutor(places[0], budget)


def _load_on(
    workers: RayExecutor | ReplicaSet, settings: RunnerSettings, tokenizer: Tokenizer | None
) -> tuple[Engine, Loaded]:
    """Let the workers load the model, and learn how many blocks there are."""
    from kvllm.distributed.replicas.engine import DataParallelEngine
    from kvllm.distributed.replicas.replica_set import ReplicaSet

    loaded = workers.load(settings)
    checker = GrammarChecker(make_grammars(settings), samples_here=False)
    if isinstance(workers, ReplicaSet):
        config = structs.replace(settings.engine, num_blocks=loaded.num_blocks)
        return DataParallelEngine(config, workers, **_request_options(settings, tokenizer, checker)), loaded
    return _engine(workers, settings, tokenizer, checker, loaded), loaded


def _load_here(device: str, settings: RunnerSettings, tokenizer: Tokenizer | None) -> tuple[Engine, Loaded]:
    """Load the model in this process, and learn how many blocks there are."""
    runner = make_runner(settings, SingleRank(), torch.device(device))
    loaded = Loaded.of(settings, runner)
    assert runner.grammars is not None
    checker = GrammarChecker(runner.grammars, samples_here=True)
    executor = make_executor(runner, async_scheduling=settings.engine.async_scheduling)
    return _engine(executor, settings, tokenizer, checker, loaded), loaded


def _engine(
    executor: Executor, settings: RunnerSettings, tokenizer: Tokenizer | None, grammars: GrammarChecker, loaded: Loaded
) -> LLMEngine:
    config = structs.replace(settings.engine, num_blocks=loaded.num_blocks)
    step_cost = measure_steps(executor, config, settings.model.vocab_size) if config.speculation else None
    return LLMEngine(config, executor, **_request_options(settings, tokenizer, grammars), step_cost=step_cost)


class RequestOptions(TypedDict):
    """The parts of an engine that read requests and end them."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    grammars: GrammarChecker
    adapters: Adapters | None


def _request_options(settings: RunnerSettings, tokenizer: Tokenizer | None, grammars: GrammarChecker) -> RequestOptions:
    model, engine = settings.model, settings.engine
    return {
        "vocab_size": model.vocab_size,
        "eos_token_ids": model.eos_token_ids,
        "tokenizer": tokenizer,
        "grammars": grammars,
        "adapters": Adapters(adaptable_shapes(model), engine.max_lora_rank) if engine.max_loras else None,
    }
