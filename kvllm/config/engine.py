"""Settings of the core, validated where they enter."""

from __future__ import annotations

from msgspec import Struct

from kvllm.compression.specs import SPECS
from kvllm.config.checks import check_types, require
from kvllm.config.compression import CompressionConfig
from kvllm.config.speculation import SpeculativeConfig
from kvllm.config.tenant import TenantConfig
from kvllm.errors import ConfigError
from kvllm.kvcache.formats import KV_CACHE_DTYPES, KV_FORMATS
from kvllm.kvcache.groups import UNIFORM, KVGroup, has_full

SWAP_MODES = ("auto", "always", "never")
"""Whether a preempted sequence's cache goes to the host: where that is cheaper than to compute it again, whenever there
is room, or not at all."""

MOST_RESIDUAL_TOKENS = 512
MOST_SELF_DRAFTS = 16
"""Sequences for which a model drafts at once, if it does that for itself."""
MEASURED_DRAFT = 3
"""Tokens of the longest draft that is timed when an engine starts."""


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Settings of the core.

    num_blocks: blocks in the KV pool, of `block_size` tokens each.
    kv_cache_dtype: one of `kvllm.kvcache.formats.KV_CACHE_DTYPES`.
    kv_residual_tokens: the last KV pairs of a sequence that are attended as they were before a quantized cache rounded
        them.
    max_model_len: longest sequence, prompt and output together, in tokens.
    max_num_seqs: most sequences that run at once.
    max_num_batched_tokens: most query tokens of one step: decodes, prefill chunks, what a compression recomputes.
    watermark: share of the pool that admission leaves free, so that running sequences can grow.
    tenants: settings by the name of the tenant; others have those of `TenantConfig()`.
    kv_groups: groups of layers with tables and lifetimes of their own, from `make_groups`.
    has_recurrent_layers: other layers hold a state for each sequence, which is that after its last token: no query is
        computed again, and a prefix is shared up to one of `num_state_snapshots` copies of states.
    shares_kv_pairs: several layers attend the KV pairs of one, which no method that reads queries knows of.
    num_host_blocks: blocks in host memory, for what leaves the pool.
    num_host_chunks: chunks there, for KV pairs that compressions drop and that may come back.
    kv_offload_dtype: of keys and values there; "auto": that of the cache.
    kv_offloading_path: directory for prefixes on the disk; None for none. kv_offloading_disk_size: GiB there, of all
        ranks together.
    swap: what becomes of a preempted sequence's cache: one of SWAP_MODES.
    async_scheduling: plan a step while the one before it is executed.
    enable_chunked_prefill: False lets a prompt that a step has room for wait until it is computed in one step.
    speculation: how tokens are drafted; None: they are not.
    max_loras: most adapters that are in use at once; 0: none can be. max_lora_rank: the highest of theirs.
    max_logprobs: most tokens of which a request may ask for log probabilities at each position; -1 for all.
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 256
    kv_cache_dtype: str = "auto"
    kv_residual_tokens: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    seed: int = 0
    compression: CompressionConfig | None = None
    tenants: dict[str, TenantConfig] = {}
    kv_groups: tuple[KVGroup, ...] = UNIFORM
    has_recurrent_layers: bool = False
    shares_kv_pairs: bool = False
    num_state_snapshots: int = 0
    num_host_blocks: int = 0
    num_host_chunks: int = 0
    kv_offload_dtype: str = "auto"
    kv_offloading_path: str | None = None
    kv_offloading_disk_size: float = 10.0
    swap: str = "auto"
    async_scheduling: bool = False
    enable_chunked_prefill: bool = True
    max_loras: int = 0
    max_lora_rank: int = 16
    max_logprobs: int = 20
    speculation: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        right = isinstance(self.compression, CompressionConfig | None)
        require(right, "compression", self.compression, "a CompressionConfig, or None")
        check_types(self)
        require(1 <= self.block_size <= 256, "block_size", self.block_size, "between 1 and 256")
        dtypes = f"choose one of {', '.join(KV_CACHE_DTYPES)}"
        require(self.kv_cache_dtype in KV_CACHE_DTYPES, "kv_cache_dtype", self.kv_cache_dtype, dtypes)
        require(self.swap in SWAP_MODES, "swap", self.swap, f"choose one of {', '.join(SWAP_MODES)}")
        dtypes = f"choose one of auto, {', '.join(KV_FORMATS)}"
        require(self.kv_offload_dtype in ("auto", *KV_FORMATS), "kv_offload_dtype", self.kv_offload_dtype, dtypes)
        if self.kv_offload_dtype != "auto" and self.kv_cache_dtype in KV_FORMATS:
            raise ConfigError(
                f"kv_offload_dtype={self.kv_offload_dtype!r} with kv_cache_dtype={self.kv_cache_dtype!r}: what is "
                'quantized already goes to the host as it is. Give kv_offload_dtype="auto"'
            )
        self._check_residual()
        self._check_speculation()
        for field in ("num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        require(
            self.max_logprobs >= -1, "max_logprobs", self.max_logprobs, "at least 0, or -1 for the whole vocabulary"
        )
        require(0 <= self.watermark < 1, "watermark", self.watermark, "at least 0 and less than 1")
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least max_num_seqs={self.max_num_seqs}, so that all running sequences can decode in one step: "
            "raise it or lower max_num_seqs",
        )
        if self.compression is not None:
            self.compression.retained(self.block_size)
        if self.active_compression is not None:
            self._check_compressible(self.active_compression)
        guaranteed = sum(tenant.guaranteed_share for tenant in self.tenants.values())
        allowed = "the guaranteed_share of all tenants together is at most 1"
        require(guaranteed <= 1 + 1e-9, "tenants: guaranteed_share", guaranteed, allowed)

    def _check_residual(self) -> None:
        """Pairs are held by their positions, and counted from the end of a sequence."""
        field, value, compression = "kv_residual_tokens", self.kv_residual_tokens, self.active_compression
        require(0 <= value <= MOST_RESIDUAL_TOKENS, field, value, f"between 0 and {MOST_RESIDUAL_TOKENS}")
        if value == 0:
            return
        allowed = f"with a kv_cache_dtype that rounds KV pairs, one of {', '.join(KV_FORMATS)}"
        require(self.kv_cache_dtype in KV_FORMATS, field, value, allowed)
        allowed = "not where layers of the model attend KV pairs of others: leave it out"
        require(not self.shares_kv_pairs, field, value, allowed)
        shortest = min((group.window for group in self.kv_groups if group.window is not None), default=value)
        require(value <= shortest, field, value, f"at most the model's sliding window of {shortest} tokens")
        if compression is not None:
            require(not compression.recalls, field, value, "not beside recall_period or recall_bound: leave one out")
            allowed = f"at most the compression's buffer={compression.buffer}, which nothing drops: raise that"
            require(value <= compression.buffer, field, value, allowed)

    def _check_speculation(self) -> None:
        """What adds up attention as it is paid cannot take back that of drafts."""
        compression, residual = self.active_compression, self.kv_residual_tokens
        if self.speculation is None:
            return
        count = self.speculation.num_speculative_tokens
        allowed = f"less than kv_residual_tokens={residual}, of which drafts take the places"
        require(residual == 0 or count < residual, "num_speculative_tokens", count, allowed)
        field, value = "speculative_config", self.speculation.method
        allowed = "not with recurrent layers, whose states take back no token: use another method"
        require(value != "self" or not self.has_recurrent_layers, field, value, allowed)
        if compression is None:
            return
        allowed = f"not with method={compression.method!r}, which keeps different numbers of KV pairs: use another"
        require(value != "self" or not compression.spec.ragged, field, value, allowed)
        require(not compression.recalls, field, value, "not beside recall_period or recall_bound: leave one out")
        allowed = f"not with method={compression.method!r}, which adds up attention over whole texts: use another"
        require(not compression.spec.reads_mass, field, value, allowed)

    @property
    def most_drafts(self) -> int:
        """Tokens that are drafted for a sequence in a step."""
        return self.speculation.num_speculative_tokens if self.speculation else 0

    @property
    def num_self_drafts(self) -> int:
        """Sequences for which a model that drafts for itself has room at once."""
        return min(MOST_SELF_DRAFTS, self.max_num_seqs)

    @property
    def num_draft_blocks(self) -> int:
        """Blocks beside those that sequences own, for what a model stores that drafts for itself."""
        if self.speculation is None or self.speculation.method != "self":
            return 0
        parts = sum(len(group.parts) for group in self.kv_groups)
        tokens = self.block_size - 1 + max(self.speculation.num_speculative_tokens, MEASURED_DRAFT)
        return self.num_self_drafts * parts * -(-tokens // self.block_size)

    def _check_recall(self, compression: CompressionConfig) -> None:
        """What is dropped is held in the format of the pool, or in one of fewer bits."""
        dtype = compression.recall_dtype
        allowed = f"kv_cache_dtype={self.kv_cache_dtype!r} is quantized already: give recall_dtype='auto'"
        require(dtype == "auto" or self.kv_cache_dtype not in KV_FORMATS, "recall_dtype", dtype, allowed)
        given, value = ("recall_period", compression.recall_period)
        if value is None:
            given, value = ("recall_bound", compression.recall_bound)
        allowed = "only where all layers are in one KV group, not beside layers with a sliding window or layer_groups"
        require(len(self.kv_groups) == 1 and not compression.layer_groups, given, value, allowed)

    def _check_compressible(self, compression: CompressionConfig) -> None:
        """Outside of a window nothing is left of which queries could be computed again, or attention be added up."""
        if compression.recalls:
            self._check_recall(compression)
        spec = compression.spec
        if self.shares_kv_pairs:
            able = [name for name, each in SPECS.items() if each.reads_cache_alone and not each.reselects]
            allowed = "layers of the model attend KV pairs of others, whose queries no method reads: use one of "
            require(compression.method in able, "method", compression.method, allowed + ", ".join(able))
        if all(group.window is None for group in self.kv_groups) and not self.has_recurrent_layers:
            return
        allowed = "the model has no layer that attends all tokens, so nothing can be compressed: leave it out"
        require(has_full(self.kv_groups), "compression", compression.method, allowed)
        able = ", ".join(name for name, each in SPECS.items() if each.reads_cache_alone)
        reason = "a sliding window, whose KV pairs are released"
        if self.has_recurrent_layers:
            reason = "a recurrent state, which earlier tokens have no more"
        allowed = f"the model has layers with {reason}, so no query can be computed again: use one of {able}"
        require(spec.reads_cache_alone, "method", compression.method, allowed)

    @property
    def kv_content(self) -> str:
        """A name for how KV pairs are computed and stored: equal tokens have equal blocks where it is the same."""
        residual = f"+{self.kv_residual_tokens}" if self.kv_residual_tokens else ""
        return f"{self.kv_cache_dtype}{residual}"

    @property
    def recalls(self) -> bool:
        """Whether what a compression drops may come back."""
        return self.active_compression is not None and self.active_compression.recalls

    @property
    def active_compression(self) -> CompressionConfig | None:
        """None if nothing is ever dropped: compression off, or retention 100%."""
        if self.compression is None or self.compression.keeps_all(self.block_size):
            return None
        return self.compression

    @property
    def shares_prefixes(self) -> bool:
        """Whether sequences may share blocks that hold the same tokens."""
        has_states = self.num_state_snapshots > 0 or not self.has_recurrent_layers
        return self.enable_prefix_caching and not self.adds_mass and has_states

    @property
    def adds_mass(self) -> bool:
        """Whether the compression method adds up attention."""
        return self.active_compression is not None and self.active_compression.spec.reads_mass
