"""One rank's runner: the model's shard, its part of the KV cache and the attention backend, put together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec import Struct

from kvllm.attention.base import AttentionBackend
from kvllm.attention.registry import AttentionSpec, explain, make_backend
from kvllm.compression.gates import read_gates
from kvllm.compression.model_inputs import WithModelInputs
from kvllm.compression.registry import METHODS
from kvllm.compression.sharded_method import ShardedMethod
from kvllm.compression.statistics import read_statistics
from kvllm.config import EngineConfig, bounding
from kvllm.errors import ConfigError
from kvllm.files.checkpoint import checkpoint_folder, open_checkpoint
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS, kv_format_of, require_head_dim, require_one_format
from kvllm.kvcache.groups import layer_parts
from kvllm.kvcache.recurrent import StateShape
from kvllm.kvcache.tiers.disk import DiskStore
from kvllm.kvcache.tiers.host import HostStore
from kvllm.models.base import Decoder
from kvllm.models.config import EXPANDED, QUANTIZATIONS, ModelConfig
from kvllm.models.layers import quantized_matrices
from kvllm.models.loader import load_model, random_model
from kvllm.models.mtp import MTPDecoder
from kvllm.models.rotary import check_one_rotation, rotary_frequencies
from kvllm.parallel import Shard, SingleRank, kv_heads
from kvllm.structured.compile import Grammars
from kvllm.structured.vocabulary import Vocabulary, read_vocabulary
from kvllm.tokenizer import load_tokenizer
from kvllm.worker import host_memory
from kvllm.worker.draft_model import DraftModel
from kvllm.worker.graphs import cuda_capture
from kvllm.worker.loaded_adapters import LoadedAdapters
from kvllm.worker.memory import enough_memory, fitting_blocks, run_heaviest_steps
from kvllm.worker.model_runner import ModelRunner
from kvllm.worker.mtp_model import MTPModel
from kvllm.worker.rare_kernels import launch_rare_kernels
from kvllm.worker.self_test import check_attention, check_integers

GIB = 1 << 30
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


class RunnerSettings(Struct, frozen=True):
    """Options that a rank loads its shard with. load_format, enforce_eager, quantization: see EngineArgs.

    gpu_memory_utilization: if set, `engine.num_blocks` is the most that is of use, and the pool gets as many as fit.
    path: of the checkpoint. tokenizer_path: of one with the tokenizer; "" for the same.
    draft: those of the model that drafts, if one does. Its pool has as many blocks.
    """

    path: str
    model: ModelConfig
    engine: EngineConfig
    dtype: str
    attention_backend: str
    load_format: str
    enforce_eager: bool = False
    gpu_memory_utilization: float | None = None
    quantization: str | None = None
    tokenizer_path: str = ""
    draft: RunnerSettings | None = None


class Loaded(Struct, frozen=True):
    """What loading a model has found out.

    num_blocks: in the KV pool. attention_backend: its name, and why it was chosen. warnings: for the log of the process
    that asked for it, since nobody sees those of ranks. weights: what became of those of a file, and collectives: how
    ranks add up, for the same log.
    """

    num_blocks: int
    attention_backend: str
    warnings: list[str] = []
    weights: str | None = None
    collectives: str = ""

    @staticmethod
    def of(settings: RunnerSettings, runner: ModelRunner) -> Loaded:
        backend, demands = runner.backend, _demands(settings.engine)
        spec = AttentionSpec(backend.cache, backend.num_query_heads, settings.model.layers, **demands)
        chosen = explain(settings.attention_backend, spec)
        warnings = [*_warnings(settings, runner, chosen)]
        num_blocks = runner.cache.num_blocks - settings.engine.num_draft_blocks
        model = runner.model
        return Loaded(num_blocks, chosen, warnings, model.weights_note, model.lm_head.shard.note)


def _warnings(settings: RunnerSettings, runner: ModelRunner, chosen: str) -> Iterator[str]:
    """Nobody shall be served slowly who did not ask for it, and not know."""
    if runner.kernel_warning:
        yield runner.kernel_warning
    if settings.attention_backend == "auto" and chosen.startswith("reference "):
        yield (
            f"attention_backend='auto' leaves {chosen}, which is too slow to serve with: change what rules the others "
            "out, or give attention_backend='reference' if it is meant"
        )
    if runner.device.type == "cuda" and not settings.enforce_eager and runner.forward_pass.graphs is None:
        yield (
            f"the attention backend {runner.backend.name} cannot be captured in CUDA graphs, so decode steps are "
            "launched kernel by kernel, which is slower: attention_backend='triton' can be captured"
        )


def rank_cache_shape(model: ModelConfig, dtype: str, engine: EngineConfig, num_ranks: int) -> CacheShape:
    """Sizes of what each of `num_ranks` ranks stores. With fewer KV heads than ranks, several ranks hold the same.

    Raises ConfigError if keys and values of the model cannot be stored as `kv_cache_dtype`, `kv_offload_dtype` and
    `recall_dtype` say.
    """
    num_kv_heads = max(1, model.num_kv_heads // num_ranks)
    compression = engine.active_compression
    scored = compression is not None and compression.spec.reselects
    dtypes = {"kv_cache_dtype": engine.kv_cache_dtype, "kv_offload_dtype": engine.kv_offload_dtype}
    if compression is not None:
        dtypes["recall_dtype"] = compression.recall_dtype
    for option, asked in dtypes.items():
        if model.latent:
            require_one_format(option, asked)
        require_head_dim(option, asked, model.head_dim)
    kv_format = kv_format_of(engine.kv_cache_dtype, dtype, model.head_dim)
    parts = layer_parts(engine.kv_groups)
    place_of = {layer: place for part in parts for place, layer in enumerate(part)}
    return CacheShape(
        model.num_layers,
        num_kv_heads,
        model.head_dim,
        engine.block_size,
        DTYPES[dtype],
        scored,
        kv_format,
        places=tuple(place_of[layer] for layer in range(model.num_layers)) if len(parts) > 1 else (),
        recurrent=state_shape(model, DTYPES[dtype], num_ranks),
        shared=model.latent is not None,
    )


def state_shape(model: ModelConfig, dtype: torch.dtype, num_ranks: int = 1) -> StateShape | None:
    """Sizes of what each rank stores for each sequence in recurrent layers, if there are any."""
    layers = model.recurrent
    if layers is None:
        return None
    of_heads = (layers.value_heads // num_ranks, layers.key_dim, layers.value_dim)
    return StateShape(len(layers.indices), layers.channels_of(num_ranks), layers.taps, *of_heads, dtype)


def make_runner(settings: RunnerSettings, shard: Shard, device: torch.device) -> ModelRunner:
    """Load a rank's shard of the model, and allocate its part of the KV pool. All ranks do it together.

    Raises ConfigError and CheckpointError as `load_model` and `make_backend` do, and ConfigError if a GPU's memory is
    too small.
    """
    engine, num_blocks, utilization = settings.engine, settings.engine.num_blocks, settings.gpu_memory_utilization
    stream = torch.cuda.Stream() if device.type == "cuda" and not settings.enforce_eager else None  # for graphs
    # Before weights are read: a wrong name must not cost a minute.
    method, small = check_runner(settings, shard, device)
    kernel_warning = check_attention(small) if device.type == "cuda" else None
    with enough_memory("the model", "take a smaller one"):
        model = load_shard(settings, shard, device)
        check_integers(quantized_matrices(model.weights()), DTYPES[settings.dtype])
        draft = _load_draft(settings.draft, model, device) if settings.draft and shard.rank == 0 else None
        store = _host_store(settings, shard, device)
        adapters = LoadedAdapters(model, engine, DTYPES[settings.dtype], device) if engine.max_loras else None
    if utilization is not None:
        probe = _runner(settings, shard, model, small, method, store, draft, adapters)
        fitting = _fitting_blocks(probe, engine, utilization, stream)
        num_blocks = min(num_blocks, _least(fitting, shard, device))
    with enough_memory(f"a KV pool of {num_blocks} blocks", "give it less"):
        backend = _backend(settings, shard, device, num_blocks + engine.num_draft_blocks)
        runner = _runner(settings, shard, model, backend, method, store, draft, adapters)
    if device.type == "cuda" and utilization is None:  # no request shall wait until kernels are compiled
        launch_rare_kernels(runner)
        run_heaviest_steps(runner, engine)
    if stream:
        with enough_memory("what CUDA graphs need", "set enforce_eager=True, give the KV pool less"):
            runner.use_graphs(cuda_capture(stream), num_blocks)
    runner.kernel_warning = kernel_warning
    return runner


def _fitting_blocks(
    probe: ModelRunner, engine: EngineConfig, utilization: float, graph_stream: torch.cuda.Stream | None
) -> int:
    """Blocks that fit beside all kernels, too: a loaded one takes memory."""
    launch_rare_kernels(probe)
    return fitting_blocks(probe, engine, utilization, graph_stream)


def check_runner(
    settings: RunnerSettings, shard: Shard, device: torch.device
) -> tuple[WithModelInputs | None, AttentionBackend]:
    """The method of a rank, and an attention backend with one block: all that can be refused without weights.

    Raises ConfigError and CheckpointError.
    """
    if settings.draft:
        _backend(settings.draft, SingleRank(), device, 1)
    return _method(settings, shard, device), _backend(settings, shard, device, 1)


def check_device(settings: RunnerSettings, device: str) -> None:
    """Raise ConfigError for what a device, "cuda" or "cpu", does not compute."""
    if settings.draft:
        check_device(settings.draft, device)
    if device != "cuda":
        return
    engine = settings.engine
    if engine.speculation and engine.speculation.method == "self":
        raise ConfigError(
            'speculative_config method="self" drafts on a CPU only, not on a GPU: use another, or device="cpu"'
        )
    if engine.recalls:
        raise ConfigError(
            "recall_period and recall_bound exchange KV pairs in the attention of a CPU only, not on a GPU: leave "
            'them out, or give device="cpu"'
        )


def _backend(settings: RunnerSettings, shard: Shard, device: torch.device, num_blocks: int) -> AttentionBackend:
    """The attention backend of a rank, over a cache of its own."""
    model = settings.model
    shape = rank_cache_shape(model, settings.dtype, settings.engine, shard.world_size)
    num_query_heads = model.num_query_heads // shard.world_size
    cache = PagedKVCache(shape, num_blocks, device)
    return make_backend(
        settings.attention_backend, cache, num_query_heads, model.scale, model.layers, **_demands(settings.engine)
    )


def _demands(engine: EngineConfig) -> dict[str, bool]:
    """The demands of the compression method and of the cache on the attention backend."""
    compression = engine.compression
    ragged = compression is not None and compression.spec.ragged
    return {"ragged": ragged, "mass": engine.adds_mass, "residual": engine.kv_residual_tokens > 0}


def _runner(
    settings: RunnerSettings,
    shard: Shard,
    model: Decoder,
    backend: AttentionBackend,
    method: WithModelInputs | None,
    store: HostStore | None,
    draft: Decoder | None,
    adapters: LoadedAdapters | None,
) -> ModelRunner:
    engine = settings.engine
    return ModelRunner(
        model,
        backend,
        engine,
        settings.model.eos_token_ids,
        method,
        samples=shard.rank == 0,
        grammars=make_grammars(settings),
        store=store,
        draft=_draft_model(settings, settings.draft, draft, backend.cache) if settings.draft and draft else None,
        adapters=adapters,
    )


def _load_draft(settings: RunnerSettings, model: Decoder, device: torch.device) -> Decoder:
    """The whole of what drafts for a model."""
    draft = load_shard(settings, SingleRank(), device)
    if isinstance(draft, MTPDecoder):
        draft.share(model)
    return draft


def _draft_model(
    settings: RunnerSettings, of_draft: RunnerSettings, draft: Decoder, beside: PagedKVCache
) -> DraftModel:
    """Over a pool with as many blocks as the cache beside it."""
    backend = _backend(of_draft, SingleRank(), beside.data.device, beside.num_blocks)
    block_bytes = draft_bytes_per_block(of_draft.model, backend.cache.shape)
    arguments = (backend, of_draft.engine, block_bytes, settings.engine.most_drafts)
    return MTPModel(draft, *arguments) if isinstance(draft, MTPDecoder) else DraftModel(draft, *arguments)


def draft_block_bytes(draft: RunnerSettings | None) -> int:
    """Bytes of a block in the pool of what drafts, of which there is one for each block of the other pool."""
    if draft is None:
        return 0
    return draft_bytes_per_block(draft.model, rank_cache_shape(draft.model, draft.dtype, draft.engine, 1))


def draft_bytes_per_block(model: ModelConfig, shape: CacheShape) -> int:
    """Bytes of a block in the pool of a model that drafts, and of hidden states of as many tokens, if it reads them."""
    hidden = shape.block_size * model.hidden_size * shape.dtype.itemsize
    return shape.bytes_per_block + (hidden if model.is_mtp else 0)


def _host_store(settings: RunnerSettings, shard: Shard, device: torch.device) -> HostStore | None:
    """The blocks that a rank has in host memory, if there are any."""
    engine = settings.engine
    if not engine.num_host_blocks:
        return None
    shape = rank_cache_shape(settings.model, settings.dtype, engine, shard.world_size)
    disk = None
    if engine.kv_offloading_path is not None:
        directory = Path(engine.kv_offloading_path) / fingerprint(settings) / f"rank-{shard.rank}-of-{shard.world_size}"
        disk = DiskStore(directory, int(engine.kv_offloading_disk_size * GIB) // shard.world_size)
    return HostStore(shape, engine.num_host_blocks, device, KV_FORMATS.get(engine.kv_offload_dtype), disk)


def fingerprint(settings: RunnerSettings) -> str:
    """A name for all that the bytes of a cached block depend on, beside its tokens: the checkpoint and how it is
    computed. Files of weights are told apart by their names, sizes and times."""
    engine, path = settings.engine, Path(settings.path)
    shape = rank_cache_shape(settings.model, settings.dtype, engine, 1)
    files = open_checkpoint(path).weight_files() if settings.load_format != "dummy" else []
    parts = [
        settings.model,
        [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        [settings.dtype, settings.quantization, settings.load_format, engine.seed if not files else None],
        [engine.kv_content, engine.kv_offload_dtype, engine.block_size, engine.max_model_len],
        [engine.kv_groups, shape.scored, shape.shared],
    ]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _method(settings: RunnerSettings, shard: Shard, device: torch.device) -> WithModelInputs | None:
    """The compression method of a rank, with what it needs to know of the model. Raises as `read_statistics`,
    `read_gates` and `check_one_rotation` do."""
    compression, model = settings.engine.active_compression, settings.model
    if compression is None:
        return None
    held, method, statistics, gates = kv_heads(model.num_kv_heads, shard), METHODS[compression.method], None, None
    folder = checkpoint_folder(Path(settings.path))
    if method.spec.calibrated:
        statistics = read_statistics(folder, model, held, device)
    if method.spec.gated:
        gates = read_gates(folder, compression.method, model, held, device)
    sharded = ShardedMethod(compression.method, held, shard) if shard.world_size > 1 else method
    longest = settings.engine.max_model_len
    if "frequencies" in method.arguments:
        check_one_rotation(model, bounding(model.windows, longest))
    frequencies = rotary_frequencies(model, longest)
    return WithModelInputs(sharded, frequencies.to(device), statistics, gates)


def make_grammars(settings: RunnerSettings) -> Grammars:
    """The grammars of requests with structured outputs, over the checkpoint's vocabulary, which is read for the first
    of them."""
    eos_token_ids = settings.model.eos_token_ids

    def read() -> Vocabulary:
        return read_vocabulary(
            load_tokenizer(settings.tokenizer_path or settings.path), settings.model.vocab_size, eos_token_ids
        )

    return Grammars(read, eos_token_ids)


def load_shard(settings: RunnerSettings, shard: Shard, device: torch.device) -> Decoder:
    """A rank's shard of the model. Raises as `load_model` does."""
    arguments = (settings.model, shard, DTYPES[settings.dtype], device, settings.engine.max_model_len)
    bits = QUANTIZATIONS[settings.quantization] if settings.quantization else None
    if settings.load_format == "dummy":
        return random_model(*arguments, seed=settings.engine.seed, bits=bits)
    return load_model(Path(settings.path), *arguments, bits=bits, expand=settings.quantization == EXPANDED)


def _least(number: int, shard: Shard, device: torch.device) -> int:
    """The least of all ranks' numbers."""
    return int(shard.all_gather_last_dim(torch.tensor([[number]], device=device)).min())


def available_memory(device: str, neighbours: int) -> int:
    """Bytes on a rank's device; a machine's memory is shared out among the ranks that run there."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return host_memory.available_memory() // neighbours
