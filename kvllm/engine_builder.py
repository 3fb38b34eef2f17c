"""The one place where an engine is put together: model, tokenizer, KV pool, and workers or replicas."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import torch
from msgspec import structs

from kvllm.config import EngineConfig, require
from kvllm.core.capacity import check_pool
from kvllm.core.drafting.step_cost import measure_steps
from kvllm.core.engine import LLMEngine
from kvllm.engine_args import EngineArgs
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape
from kvllm.lora.files import Adapters
from kvllm.models.config import EXPANDED, ModelConfig
from kvllm.parallel import SingleRank
from kvllm.pool_sizes import PoolSizes, pool_sizes
from kvllm.start_report import report_start
from kvllm.structured.checker import GrammarChecker
from kvllm.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from kvllm.worker.adapter_weights import adaptable_shapes
from kvllm.worker.build import (
    Loaded,
    RunnerSettings,
    available_memory,
    check_runner,
    draft_bytes_per_block,
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
    config, shape, draft_bytes = args.engine_config, cache_shape(args), draft_block_bytes(args)
    tokenizer = read_tokenizer(args)
    args.fetch_weights()
    with ExitStack() as started:  # ended here unless all goes well
        workers = _start_workers(args) if args.uses_ray else None
        if workers:
            started.callback(workers.close)
        device = workers.device if workers else local_device(args)
        check_device(args, device)
        _check_recall(config, device)
        plans_ahead = device == "cuda" if args.async_scheduling is None else args.async_scheduling
        config = structs.replace(config, async_scheduling=plans_ahead)
        free = workers.available_memory if workers else available_memory(device, 1)
        sizes = pool_sizes(args, config, shape, shape.bytes_per_block + draft_bytes, device, free)
        settings = runner_settings(
            args, sizes.config, tokenizer, args.gpu_memory_utilization if sizes.measured else None
        )
        load = partial(_load_on, workers, args) if workers else partial(_load_here, device, args)
        engine, loaded = load(settings, tokenizer)
        if args.max_model_len is not None:
            check_pool(engine.config)  # of the size that was found
        if isinstance(engine, LLMEngine) and args.kv_offloading_path is not None:
            engine.step()  # by which it learns what is on the disk
        _count_memory(engine, sizes, shape.bytes_per_block, draft_bytes, args.data_parallel_size)
        report_start(args, settings, engine, device, loaded, shape.bytes_per_block)
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


def check_device(args: EngineArgs, device: str) -> None:
    """Raise ConfigError for weights that a device does not compute with."""
    if args.draft:
        check_device(args.draft, device)
    if device == "cuda" and args.speculation and args.speculation.method == "self":
        raise ConfigError(
            'speculative_config method="self" drafts on a CPU only, not on a GPU: use another, or device="cpu"'
        )
    if device == "cuda" and args.quantization not in (None, EXPANDED):
        raise ConfigError(f"quantization={args.quantization!r} is computed on a CPU only: leave it out on a GPU")
    form = args.model_config.weight_format
    if device == "cuda" and form and form.integers:
        raise ConfigError(
            f"{args.path} has weights of integers ({form.method}), which are computed on a CPU only: use a "
            'checkpoint of floating point, or device="cpu"'
        )


def _check_recall(config: EngineConfig, device: str) -> None:
    if device == "cuda" and config.recalls:
        raise ConfigError(
            "recall_period and recall_bound exchange KV pairs in the attention of a CPU only, not on a GPU: leave "
            'them out, or give device="cpu"'
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


def draft_block_bytes(args: EngineArgs) -> int:
    """Bytes of a block in the pool of what drafts, of which there is one for each block of the other pool."""
    return draft_bytes_per_block(args.draft.model_config, cache_shape(args.draft)) if args.draft else 0


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
    return find_tokenizer(args.path) if args.tokenizer is None else load_tokenizer(args.tokenizer_path)


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


class RequestOptions(TypedDict):
    """The parts of an engine that read requests and end them."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    grammars: GrammarChecker
    adapters: Adapters | None


def _request_options(
    args: EngineArgs, settings: RunnerSettings, tokenizer: Tokenizer | None, grammars: GrammarChecker
) -> RequestOptions:
    model = settings.model
    return {
        "vocab_size": model.vocab_size,
        "eos_token_ids": model.eos_token_ids,
        "tokenizer": tokenizer,
        "grammars": grammars,
        "adapters": Adapters(adaptable_shapes(model), args.max_lora_rank) if args.enable_lora else None,
    }
