"""Every option of an engine, with its name, default and check.

This module imports no torch, so a command line can offer the options at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from kvllm.compression.specs import AUTO
from kvllm.config import (
    CompressionConfig,
    EngineConfig,
    Refused,
    SpeculativeConfig,
    TenantConfig,
    bounding,
    check_host_size,
    converted,
    make_kv_groups,
    require,
    without_refused,
)
from kvllm.errors import ConfigError
from kvllm.files.checkpoint import Checkpoint, checkpoint_folder, open_checkpoint
from kvllm.files.hub import Snapshot, fetch_tokenizer, hub_id, open_snapshot
from kvllm.generation_config import named_eos_tokens, sampling_defaults
from kvllm.kvcache.groups import UNIFORM, KVGroup, block_layers
from kvllm.layer_shares import resolve
from kvllm.models.config import DTYPE_NAMES, DTYPES, EXPANDED, QUANTIZATIONS, ModelConfig, load_model_config
from kvllm.pooling_config import CONVERSIONS, RUNNERS, PoolerConfig, PoolingConfig, read_pooling

DEFAULT_MODEL = Path(__file__).parent / "assets" / "reasoner"
DEVICES = ("auto", "cuda", "cpu")
EXECUTOR_BACKENDS = ("inline", "ray")
PLACEMENTS = ("STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD")
LOAD_FORMATS = ("auto", "dummy")
INT64 = 1 << 63
GIB = 1 << 30
T = TypeVar("T")
SIZES: dict[str, tuple[int, int]] = {
    "max_model_len": (2, INT64 - 1),  # the model says how many
    "max_num_seqs": (1, 1 << 16),  # each takes a slot in tables that are allocated at the start
    "max_num_batched_tokens": (1, (1 << 31) - 1),  # numbered in 32 bits
    "num_gpu_blocks_override": (1, INT64 - 1),  # the memory says how many
    "kv_cache_memory_bytes": (1, INT64 - 1),
    "tensor_parallel_size": (1, 1 << 10),
    "data_parallel_size": (1, 1 << 10),
    "max_worker_restarts": (0, (1 << 31) - 1),
    "max_logprobs": (-1, 1 << 22),
    "max_loras": (1, 1 << 10),
    "max_lora_rank": (1, 64),
    "seed": (-INT64, INT64 - 1),
}
"""The smallest and the largest value of each."""
CODE = "code of a checkpoint is never run: KvLLM has the models that docs/models.md lists"
TEXT = "models read and write text alone"
REFUSED: Refused = {
    "trust_remote_code": ((False,), CODE),
    "code_revision": ((), CODE),
    "tokenizer_mode": (("auto", "hf"), "a tokenizer is read as its files say"),
    "tokenizer_revision": ((), "a tokenizer from a hub is that of its main branch"),
    "skip_tokenizer_init": (
        (False,),
        "prompts may be token ids in any case, and SamplingParams(detokenize=False) makes no text",
    ),
    "task": (("auto", "generate"), 'give runner="pooling" instead, and convert="embed" or "classify"'),
    "logits_processors": (
        ([],),
        "no code of a user runs in a step: use logit_bias, allowed_token_ids, bad_words or structured_outputs",
    ),
    "fully_sharded_loras": ((False,), "a rank holds its part of one of the two matrices, and the other whole"),
    "max_cpu_loras": ((), "adapters are read from their files when they are needed: max_loras says how many are held"),
    "lora_dtype": (("auto",), "adapters have the dtype of the model"),
    "limit_mm_per_prompt": (({},), TEXT),
    "mm_processor_kwargs": (({},), TEXT),
    "allowed_local_media_path": (("",), TEXT),
    "enable_prompt_embeds": ((False,), "prompts are text or token ids"),
    "pipeline_parallel_size": ((1,), "layers are not spread over ranks: use tensor_parallel_size"),
    "enable_expert_parallel": ((False,), "experts are shared out as all weights are: use tensor_parallel_size"),
    "cpu_offload_gb": ((0,), "weights stay on their device: use a smaller dtype, or quantization"),
    "compilation_config": (({}, 0), "decode steps are CUDA graphs, unless enforce_eager is set"),
    "structured_outputs_config": (
        ({}, *({"backend": name} for name in ("auto", "guidance"))),
        "llguidance compiles all rules, and each has its options: StructuredOutputsParams(disable_any_whitespace=True)",
    ),
    "enable_sleep_mode": ((False,), "an engine keeps its memory until it is closed"),
    "kv_transfer_config": ((), "KV pairs stay in their engine: kv_offloading_size moves them to the host"),
    "disable_log_stats": ((True, False), "statistics are never logged: LLM.stats() has them"),
    "disable_custom_all_reduce": ((True, False), "ranks of a node share memory in any case"),
    "download_dir": ((), "downloads lie in the cache of huggingface_hub: set HF_HOME, or HF_HUB_CACHE"),
    "served_model_name": ((), "a server has it: kvllm serve --served-model-name"),
}
"""Options of vLLM that an engine has not: the values that change nothing, and why others are refused."""


def _by_name(cls: type[T]) -> type[T]:
    """Let the constructor of a dataclass refuse names that it does not have with ConfigError, take those of `REFUSED`
    that ask for nothing, and take None for any default."""
    init = cls.__init__

    @wraps(init)
    def by_name(self: T, *args: Any, **options: Any) -> None:
        defaults = {field.name: field.default for field in fields(cls)}  # type: ignore[arg-type]
        known = without_refused("LLM", options, defaults, REFUSED)
        given = {name: value for name, value in known.items() if value is not None or defaults[name] is None}
        if len(args) > 1 or (args and "model" in options):
            raise ConfigError(f"LLM got {args!r}: only the model is given without a name, and only once")
        init(self, *args, **given)

    cls.__init__ = by_name
    return cls


@_by_name
@dataclass(frozen=True)
class EngineArgs:
    """Options of an engine.

    Args:
        model: directory of a Hugging Face checkpoint (config.json, safetensors, tokenizer), or the id of a model on a
            hub, ORG/NAME, with ORG/NAME:Q4_K_M for one of its GGUF files, which is downloaded. Default: the small
            reasoning model that comes with the package.
        tokenizer: directory of the tokenizer, or the id of a model with it, if it is not the checkpoint's.
        revision: branch, tag or commit of a model on a hub. A directory has none, so this changes nothing there.
        hf_overrides: keys of config.json with other values than there.
        generation_config: where defaults of sampling come from: "auto" for the checkpoint's generation_config.json,
            "vllm" for those of SamplingParams, or the directory of another such file.
        dtype: "bfloat16", "float32" or "float", "float16" or "half", or "auto" for the checkpoint's own; on a CPU,
            float16 runs as float32, and one without bfloat16 products holds bfloat16 weights in float32.
        device: "cuda", "cpu", or "auto" for a GPU if there is one, with Ray in the cluster.
        max_model_len: longest sequence in tokens, prompt and output; default what the model was made for.
        max_num_seqs: most sequences that run at once, up to 65,536.
        max_num_batched_tokens: most tokens of one step; longer prompts are computed in chunks, and what takes more to
            compress is compressed over several steps.
        enable_chunked_prefill: without it, each prompt is computed in one step, which then may have `max_model_len`
            tokens.
        max_logprobs: most tokens of which a request may ask for log probabilities at each position; -1 for all.
        block_size: tokens of a KV block, 1 to 256.
        kv_cache_dtype: of keys and values in the cache: "int8", "int6_int4", "int6_int4_hadamard", "int4",
            "int4_hadamard" or "fp8_e4m3" with a scale for each token and head, "bfloat16", or "auto" for that of
            activations (docs/kv-cache-dtypes.md).
        kv_residual_tokens: the last KV pairs of each sequence, up to 512, that are attended as they were before a
            quantized cache rounded them, on a CPU.
        num_gpu_blocks_override: blocks in the KV pool (with `layer_groups`, as many bytes as these take without), or
        kv_cache_memory_bytes: its size in bytes, on each rank. Default: on a GPU, what model and steps leave of
            `gpu_memory_utilization`; else half of the free memory, 4 GiB at most.
        gpu_memory_utilization: share of a GPU's memory that may be in use, by other processes too.
        enforce_eager: on a GPU, launch kernels one by one, instead of replaying CUDA graphs of steps.
        enable_prefix_caching: let requests share the blocks of equal beginnings.
        disable_hybrid_kv_cache_manager: let all layers share their blocks, so that layers with a sliding window keep
            those after it, too.
        tensor_parallel_size: ranks that share the model, each a process; more than one need Ray (docs/distributed.md).
        data_parallel_size: replicas that share out the requests, each with its own ranks and KV pool, on Ray.
        distributed_executor_backend: "inline" (one rank, in this process) or "ray"; default "ray" for several ranks.
        placement_strategy: where Ray puts the ranks: "STRICT_PACK" (one node), "PACK", "SPREAD" or "STRICT_SPREAD".
        max_worker_restarts: how many times lost workers are replaced before `generate` raises.
        seed: of requests that bring none. An integer of 64 bits.
        compression: how the KV cache is compressed while decoding; None for not at all.
        watermark: share of the KV pool that admission leaves free, so that running sequences can grow.
        tenants: weights, guarantees and limits by the name of the tenant; others have those of `TenantConfig()`.
        kv_offloading_size: GiB of host memory for what leaves the KV pool, of all ranks of an engine together; None for
            none (docs/tiers.md).
        swap_space: the same, of each rank.
        kv_offloading_backend: "native", which is this engine's own.
        kv_offload_dtype: of keys and values on the host: "int8", "int4" or "fp8_e4m3", which changes them a little, or
            "auto" for what the pool has.
        kv_offloading_path: directory where prefixes are kept on a disk, too, and found again by later processes.
        kv_offloading_disk_size: GiB there, of all ranks of an engine together.
        swap: whether the cache of a preempted sequence goes to the host: "auto" where that is cheaper than to compute
            it again, "always" while there is room, or "never".
        attention_backend: "triton", "flash_attn_3", "flash_attn", "flashinfer", "xformers", "cpu", "reference", or
            "auto" for the fastest of those that can do what is asked.
        load_format: "auto" reads the checkpoint's weights, "dummy" makes random ones from its config.json alone.
        async_scheduling: plan a step while the one before it is executed, which changes no token; default on a GPU.
        quantization: "int8" or "int4": weights of so many bits, made when the model is loaded. "dtype": the integers of
            a file, which are computed with otherwise, are expanded to `dtype`.
        enable_lora: let requests name LoRA adapters (docs/models.md).
        max_loras: most adapters that are in use at once; requests with further ones wait.
        max_lora_rank: the largest rank of an adapter, up to 64.
        runner: "generate" for text; "pooling" for embeddings, scores or classes, with the methods and routes for these;
            "auto" for what the checkpoint is made for.
        convert: what a model of text is pooled for, where its files do not say: "embed" or "classify".
        pooler_config: how: {"pooling_type": "LAST", "MEAN" or "CLS", "use_activation": true}, where the checkpoint does
            not say, or says otherwise.
        speculative_config: draft several tokens of a sequence and let one pass find the right ones: options of
            SpeculativeConfig, as {"method": "ngram", "num_speculative_tokens": 8}.

    None stands for the default of each. Options of vLLM that are not among them may be given as long as they ask for
    nothing (`REFUSED`).

    Raises:
        ConfigError: an option is unknown, or has a wrong type or value, whatever the model is.
    """

    model: str | Path = DEFAULT_MODEL
    _: KW_ONLY
    tokenizer: str | None = None
    revision: str | None = None
    hf_overrides: dict[str, Any] | None = None
    generation_config: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    max_logprobs: int = 20
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_residual_tokens: int = 0
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    disable_hybrid_kv_cache_manager: bool = False
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    placement_strategy: str = "STRICT_PACK"
    max_worker_restarts: int = 3
    seed: int = 0
    compression: CompressionConfig | None = None
    watermark: float = 0.01
    tenants: dict[str, TenantConfig] = dataclasses.field(default_factory=dict)
    kv_offloading_size: float | None = None
    swap_space: float | None = None
    kv_offloading_backend: str = "native"
    kv_offload_dtype: str = "auto"
    kv_offloading_path: str | None = None
    kv_offloading_disk_size: float = 10.0
    swap: str = "auto"
    attention_backend: str = "auto"
    load_format: str = "auto"
    async_scheduling: bool | None = None
    quantization: str | None = None
    speculative_config: dict[str, Any] | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "dtype", DTYPE_NAMES.get(self.dtype, self.dtype))
        self._check_names()
        self._check_sizes()
        groups = self.compression.layer_groups if isinstance(self.compression, CompressionConfig) else ()
        allowed = "without disable_hybrid_kv_cache_manager, which lets all layers share their blocks: leave one out"
        require(not (groups and self.disable_hybrid_kv_cache_manager), "layer_groups", groups, allowed)
        self._engine_config(1, self.max_model_len or 2)  # which checks the options that it takes over
        check_host_size(self._engine_config(1, 2), self.host_size)

    @property
    def uses_ray(self) -> bool:
        several = self.tensor_parallel_size > 1 or self.data_parallel_size > 1
        return self.distributed_executor_backend == "ray" or several

    @cached_property
    def snapshot(self) -> Snapshot | None:
        """Of a hub's model, which is looked up once; None for a directory. Raises CheckpointError."""
        asked = hub_id(self.model)
        return None if asked is None else open_snapshot(asked, self.revision, self._memory)

    @property
    def path(self) -> Path:
        """The checkpoint's directory, which for a hub's model may lack the weights until `fetch_weights`; or its file,
        which is downloaded. Raises CheckpointError."""
        snapshot = self.snapshot
        if snapshot is not None and snapshot.gguf is not None and not snapshot.is_whole:
            load_model_config(self.described_path)  # which refuses a model before gigabytes of it come
            snapshot.fetch_weights()
        return Path(self.model) if snapshot is None else snapshot.path

    @property
    def described_path(self) -> Path:
        """As `path`, but nothing is downloaded of a GGUF file except its header. Raises CheckpointError."""
        return Path(self.model) if self.snapshot is None else self.snapshot.fetch_headers()

    @property
    def name(self) -> str:
        """The model's, for people."""
        return Path(self.model).name

    @property
    def served_name(self) -> str:
        """The model's, for clients of a server: as it was given."""
        return self.name if Path(self.model) == DEFAULT_MODEL else str(self.model)

    def fetch_weights(self) -> None:
        """Download the weights that are to be read, if they are on a hub. Raises CheckpointError."""
        if self.snapshot is not None and self.load_format != "dummy":
            self.snapshot.fetch_weights()
        if self.draft:
            self.draft.fetch_weights()

    @property
    def commit(self) -> str | None:
        """`revision`, as the commit that a hub's model has there: with it, the hub is not asked again."""
        return self.revision if self.snapshot is None else self.snapshot.commit

    @cached_property
    def tokenizer_path(self) -> Path:
        """Of the tokenizer's files, which come from a hub for an id. Raises CheckpointError."""
        if self.tokenizer is None:
            return self.path
        asked = hub_id(self.tokenizer)
        return Path(self.tokenizer) if asked is None else fetch_tokenizer(asked, self._memory)

    @cached_property
    def tokenizer_files(self) -> Checkpoint:
        """What has the tokenizer. Raises CheckpointError."""
        return open_checkpoint(self.tokenizer_path)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Raises ConfigError."""
        return None if self.speculative_config is None else SpeculativeConfig(**self.speculative_config)

    @cached_property
    def draft(self) -> EngineArgs | None:
        """The options of the model that drafts, if one does. Its cache is plain, and holds sequences up to its own
        `max_position_embeddings`. Raises CheckpointError, and ConfigError for a model that cannot draft for this one.
        """
        options = self.speculation
        if options is None or not options.by_model:
            return None
        if options.method != "draft_model":
            field, value = "tensor_parallel_size", self.tensor_parallel_size
            allowed = f'1 with speculative_config method="{options.method}": one rank drafts with all of the model'
            require(value == 1, field, value, allowed)
        if not options.has_model:
            return None
        own: dict[str, Any] = {"model": options.model, "quantization": options.quantization}
        kind = EngineArgs
        if options.method == "mtp":
            kind = _MTPArgs
            own = {"model": self.path, "quantization": self.quantization, "hf_overrides": self.hf_overrides}
        draft = kind(
            **own,
            dtype=self.dtype,
            device=self.device,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self._step_tokens(self.engine_config.max_model_len),
            block_size=self.block_size,
            enable_prefix_caching=False,
            disable_hybrid_kv_cache_manager=True,
            attention_backend=self.attention_backend,
            load_format=self.load_format,
            runner="generate",
        )
        model, size, field = draft.model_config, self.model_config.vocab_size, "speculative_config: model"
        allowed = f"it has {model.vocab_size} tokens, and {self.path} has {size}: use one with the same vocabulary"
        require(model.vocab_size == size, field, options.model, allowed)
        allowed = "it has recurrent layers, whose states take back no token: use another"
        require(model.recurrent is None, field, options.model, allowed)
        longest = min(self.engine_config.max_model_len, model.max_position_embeddings)
        return dataclasses.replace(draft, max_model_len=longest)

    @property
    def host_size(self) -> float | None:
        """GiB of host memory of all ranks of an engine together, None for none."""
        if self.kv_offloading_size is None and self.swap_space:
            return self.swap_space * self.tensor_parallel_size
        return self.kv_offloading_size

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """Options of SamplingParams that the checkpoint asks for. Raises ConfigError."""
        return sampling_defaults(self.path, self.generation_config)

    @cached_property
    def pooling(self) -> PoolingConfig | None:
        """How the model is pooled, None if it generates text. Raises CheckpointError, and ConfigError."""
        pooler = None if self.pooler_config is None else PoolerConfig(**self.pooler_config)
        pooling = read_pooling(self.path, self.hf_overrides, self.runner, self.convert, pooler)
        allowed = "adapters change text alone, not embeddings, scores or classes: leave it out"
        require(pooling is None or not self.enable_lora, "enable_lora", self.enable_lora, allowed)
        return pooling

    @cached_property
    def model_config(self) -> ModelConfig:
        """The checkpoint's. Raises CheckpointError, and ConfigError for options that do not fit the model."""
        model = load_model_config(self.path, self.hf_overrides, generates=self.pooling is None)
        if named := named_eos_tokens(self.generation_config):
            eos_token_ids = tuple(dict.fromkeys((*model.eos_token_ids, *named)))
            model = msgspec.structs.replace(model, eos_token_ids=eos_token_ids)
        self._check_parallel(model)
        longest, length = model.max_position_embeddings, self.max_model_len
        allowed = f"between 2 and the model's max_position_embeddings={longest}"
        require(length is None or length <= longest, "max_model_len", length, allowed)
        if self.quantization not in (None, EXPANDED) and model.weight_format:
            raise ConfigError(
                f"quantization={self.quantization!r} makes weights from those of full precision, and {self.path} is "
                "quantized already: leave it out"
            )
        self._check_windows(model)
        return model

    @cached_property
    def engine_config(self) -> EngineConfig:
        """With as many blocks as can be of use: there may be memory for fewer."""
        length = self.max_model_len or self.model_config.max_position_embeddings
        compression, shares = self._compression(), self.model_config.shares_kv_pairs
        if shares and self.compression is not None and self.compression.method == AUTO:
            compression = msgspec.structs.replace(self.compression, method="streaming")  # reads no queries
        groups = UNIFORM
        if not self.disable_hybrid_kv_cache_manager:
            windows = bounding(self.model_config.windows, length)
            if compression is not None:
                compression = resolve(compression, checkpoint_folder(self.path), windows, self.block_size)
            groups = make_kv_groups(windows, compression)
        most = (group.most_blocks(length, self.block_size, self._step_tokens(length)) for group in groups)
        config = self._engine_config(self.max_num_seqs * sum(most), length, groups)
        recurrent = self.model_config.recurrent is not None
        return msgspec.structs.replace(
            config, compression=compression, has_recurrent_layers=recurrent, shares_kv_pairs=shares
        )

    @property
    def pool_blocks(self) -> int | None:
        """Blocks in the pool, if `num_gpu_blocks_override` says so. Where `layer_groups` lets blocks hold fewer layers,
        there are more of them, so that the pool has the same bytes."""
        if self.num_gpu_blocks_override is None:
            return None
        config, num_layers = self.engine_config, self.model_config.num_layers
        windows, alike = bounding(self.model_config.windows, config.max_model_len), UNIFORM
        if not self.disable_hybrid_kv_cache_manager:
            alike = make_kv_groups(windows, None)
        layers, fewer = (block_layers(groups, num_layers) for groups in (alike, config.kv_groups))
        return max(1, self.num_gpu_blocks_override * layers // fewer)

    def _engine_config(
        self, num_blocks: int, max_model_len: int, kv_groups: tuple[KVGroup, ...] = UNIFORM
    ) -> EngineConfig:
        return EngineConfig(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            block_size=self.block_size,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_residual_tokens=self.kv_residual_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self._step_tokens(max_model_len),
            enable_chunked_prefill=self.enable_chunked_prefill,
            max_logprobs=self.max_logprobs,
            enable_prefix_caching=self.enable_prefix_caching,
            seed=self.seed,
            compression=self._compression(),
            watermark=self.watermark,
            tenants=self.tenants,
            kv_groups=kv_groups,
            kv_offload_dtype=self.kv_offload_dtype,
            kv_offloading_path=self.kv_offloading_path,
            kv_offloading_disk_size=self.kv_offloading_disk_size,
            swap=self.swap,
            speculation=self.speculation,
            max_loras=self.max_loras if self.enable_lora else 0,
            max_lora_rank=self.max_lora_rank,
        )

    def _memory(self) -> int:
        """Bytes of the memory for weights, of all ranks together."""
        import torch

        from kvllm.worker.host_memory import total_memory

        if self.device != "cpu" and torch.cuda.is_available():
            return torch.cuda.mem_get_info()[1] * self.tensor_parallel_size
        return total_memory()

    def _step_tokens(self, max_model_len: int) -> int:
        """Most tokens of one step."""
        most = self.max_num_batched_tokens
        return most if self.enable_chunked_prefill else max(most, max_model_len)

    def _compression(self) -> CompressionConfig | None:
        """With a method instead of "auto". EngineConfig refuses what is no CompressionConfig."""
        given = self.compression
        return given.with_method() if isinstance(given, CompressionConfig) else given

    def _check_types(self) -> None:
        require(isinstance(self.model, str | Path), "model", self.model, "the directory of a checkpoint, or an id")
        hints = get_type_hints(type(self))
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            found = converted(field.name, str(value) if isinstance(value, Path) else value, hints[field.name])
            # Errors show numbers as they were given, and EngineConfig takes no dicts for compression and tenants.
            if type(value) not in (bool, int, float, str) and field.name not in ("compression", "tenants"):
                object.__setattr__(self, field.name, found)

    def _check_names(self) -> None:
        allowed = {
            "dtype": ("auto", *DTYPES, *DTYPE_NAMES),
            "device": DEVICES,
            "distributed_executor_backend": (*EXECUTOR_BACKENDS, None),
            "placement_strategy": PLACEMENTS,
            "load_format": LOAD_FORMATS,
            "quantization": (*QUANTIZATIONS, None),
            "kv_offloading_backend": ("native",),
            "runner": RUNNERS,
            "convert": CONVERSIONS,
        }
        for field, names in allowed.items():
            value = getattr(self, field)
            require(value in names, field, value, f"choose one of {', '.join(map(str, names))}")

    def _check_sizes(self) -> None:
        for field, (least, most) in SIZES.items():
            value = getattr(self, field)
            require(value is None or value >= least, field, value, f"at least {least}")
            require(value is None or value <= most, field, value, f"at most {most}")
        field, value = "gpu_memory_utilization", self.gpu_memory_utilization
        require(0 < value <= 1, field, value, "greater than 0 and at most 1")
        for field in ("kv_offloading_size", "kv_offloading_disk_size"):
            size = getattr(self, field)
            require(size is None or 0 < size < INT64 / GIB, field, size, "a number of GiB above 0")
        require(self.swap_space is None or self.swap_space >= 0, "swap_space", self.swap_space, "GiB, at least 0")
        allowed = "give kv_offloading_size, which is that of all ranks together, or swap_space, of each: not both"
        both = self.kv_offloading_size is not None and bool(self.swap_space)
        require(not both, "swap_space", self.swap_space, allowed)
        allowed = "only beside kv_offloading_size, through which all blocks pass: give that, too"
        alone = self.kv_offloading_path is not None and self.host_size is None
        require(not alone, "kv_offloading_path", self.kv_offloading_path, allowed)
        if self.num_gpu_blocks_override is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"num_gpu_blocks_override={self.num_gpu_blocks_override} and "
                f"kv_cache_memory_bytes={self.kv_cache_memory_bytes} both size the KV pool: give one"
            )
        if self.distributed_executor_backend == "inline":
            sizes = f"tensor_parallel_size={self.tensor_parallel_size} and data_parallel_size={self.data_parallel_size}"
            alone = self.tensor_parallel_size == self.data_parallel_size == 1
            allowed = f'it runs one rank, with {sizes} there are more: use "ray" or None'
            require(alone, "distributed_executor_backend", "inline", allowed)

    def _check_windows(self, model: ModelConfig) -> None:
        sliding = sum(layer.window is not None for layer in model.layers)
        active = self._engine_config(1, 2).active_compression
        if sliding == 0 or active is None or not self.disable_hybrid_kv_cache_manager:
            return
        raise ConfigError(
            f"{sliding} of the model's {model.num_layers} layers attend only a sliding window. Their KV pairs cannot "
            "be compressed, and with disable_hybrid_kv_cache_manager=True all layers share their blocks: leave one out"
        )

    def _check_parallel(self, model: ModelConfig) -> None:
        field, value = "tensor_parallel_size", self.tensor_parallel_size
        heads = model.num_kv_heads
        shared_out = heads % value == 0 or value % heads == 0
        require(shared_out, field, value, f"a divisor of the model's {heads} KV heads, or a multiple of them")
        allowed = (
            f"at most the model's {heads} KV heads with recall_period or recall_bound, since all queries of a head"
        )
        allowed += " together choose what comes back: lower it"
        require(value <= heads or not self._engine_config(1, 2).recalls, field, value, allowed)
        sizes = {"query heads": model.num_query_heads, **model.mlp_columns, **model.recurrent_parts}
        for name, size in sizes.items():
            require(size % value == 0, field, value, f"a divisor of the model's {size} {name}")


class _MTPArgs(EngineArgs):
    """Of the layer of a checkpoint that predicts later tokens."""

    @cached_property
    def model_config(self) -> ModelConfig:
        return super().model_config.mtp
