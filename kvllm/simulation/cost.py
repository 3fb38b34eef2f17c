"""A roofline: how long a device computes, from shapes and lengths alone.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer. A pass adds up its operations
over the layers, and what each layer and step costs beside them. Heads and matrices are divided among the devices of a
tensor-parallel group; all figures are those of one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from kvllm.config import EngineConfig, require
from kvllm.errors import ConfigError
from kvllm.kvcache.formats import KV_FORMATS, kv_format_of, require_one_format
from kvllm.kvcache.groups import UNIFORM, KVGroup, block_layers
from kvllm.kvcache.tiers.chunks import CHUNK, ERROR_BYTES, POSITION_BYTES
from kvllm.models.config import DTYPE_NAMES, ModelConfig
from kvllm.simulation.hardware import Hardware

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(slots=True)
class Attended:
    """KV pairs that a pass attends in one layer.

    visible: those of each token, summed over tokens. read: those of all tokens of a sequence, summed over sequences.
    """

    visible: int = 0
    read: int = 0


@dataclass(slots=True)
class QueryBatch:
    """Query tokens of a pass.

    visible, read: see Attended; of layers in the first KV group, and of those without a window in none of the others.
    sliding: of layers with a window, by their window. others: of further KV groups that attend all tokens, with the
    number of their layers, by the group's index.
    """

    sequences: int = 0
    tokens: int = 0
    visible: int = 0
    read: int = 0
    sliding: dict[int, Attended] = field(default_factory=dict)
    others: dict[int, tuple[int, Attended]] = field(default_factory=dict)

    def add(self, tokens: int, cached: int) -> None:
        """Add new tokens of a sequence with `cached` KV pairs: each attends those, the ones before it, and itself."""
        self.sequences += 1
        self.tokens += tokens
        self.visible += tokens * cached + tokens * (tokens + 1) // 2
        self.read += cached + tokens

    def add_other(self, group: int, layers: int, tokens: int, cached: int) -> None:
        """Add what new tokens of a sequence with `cached` KV pairs in another KV group attend there."""
        _, attended = self.others.setdefault(group, (layers, Attended()))
        attended.visible += tokens * cached + tokens * (tokens + 1) // 2
        attended.read += cached + tokens

    def add_sliding(self, window: int, tokens: int, position: int) -> None:
        """Add what new tokens of a sequence, the first of them at `position`, attend in a layer with that window."""
        attended = self.sliding.setdefault(window, Attended())
        growing = min(tokens, max(0, window - position))  # tokens whose window begins with the text
        attended.visible += growing * position + growing * (growing + 1) // 2 + (tokens - growing) * window
        attended.read += min(position, window - 1) + tokens


@dataclass(slots=True)
class RecallBatch:
    """What queries score in one layer before its attention, in each KV head.

    products: of a query token and a KV pair. resident, dropped: KV pairs whose keys are read. exchanged: dropped KV
    pairs that change places with residents.
    """

    products: int = 0
    resident: int = 0
    dropped: int = 0
    exchanged: float = 0.0

    def add(self, tokens: int, cached: int, dropped: int, exchanged: float) -> None:
        """Add new tokens of a sequence with `cached` KV pairs beside those that it has dropped."""
        self.products += tokens * (cached + dropped) + tokens * (tokens + 1) // 2
        self.resident += cached + tokens
        self.dropped += dropped
        self.exchanged += exchanged


class CostModel:
    """Seconds and bytes of one model on one machine.

    Raises ConfigError if the machine has no rate for the dtype, or too few devices, or the model cannot be divided.
    """

    def __init__(
        self,
        hardware: Hardware,
        model: ModelConfig,
        dtype: str,
        tensor_parallel_size: int = 1,
        kv_cache_dtype: str = "auto",
    ) -> None:
        _check(hardware, model, dtype, tensor_parallel_size)
        if model.latent:
            require_one_format("kv_cache_dtype", kv_cache_dtype)
        self.kv_format = kv_format_of(kv_cache_dtype, dtype, model.head_dim)
        self.hardware = hardware
        self.model = model
        self.layers_of = Counter(model.windows)
        self.devices = tensor_parallel_size
        self.itemsize = ITEMSIZE[dtype]
        self.query_heads = model.num_query_heads // tensor_parallel_size
        self.kv_heads = model.num_kv_heads // tensor_parallel_size
        self._bytes_per_s = hardware.bytes_per_s * hardware.bandwidth_efficiency
        self._matmul_flops = hardware.flops_per_s[dtype] * hardware.matmul_efficiency
        self._attention_flops = hardware.flops_per_s[dtype] * hardware.attention_efficiency
        score_rate = hardware.flops_per_s.get("float32", hardware.flops_per_s[dtype])
        self._score_flops = score_rate * hardware.score_efficiency
        # Weights, in numbers, of this device's part.
        if model.latent:
            self.q_weights, self.attention_weights = model.latent.weights(model.hidden_size, self.query_heads)
        else:
            self.q_weights = model.hidden_size * self.query_heads * model.head_dim
            self.attention_weights = 2 * (self.q_weights + model.hidden_size * self.kv_heads * model.head_dim)
        self.mlp_weights = 3 * model.hidden_size * model.intermediate_size // tensor_parallel_size  # gate, up, down
        count, inner = (model.experts.count, model.experts.intermediate_size) if model.experts else (0, 0)
        shared = model.experts.shared_intermediate_size if model.experts else 0
        # Of a layer with experts, what every token multiplies: the router, and an MLP beside them.
        self.router_weights = model.hidden_size * count + 3 * model.hidden_size * shared // tensor_parallel_size
        self.expert_weights = 3 * model.hidden_size * inner // tensor_parallel_size  # of one of them
        self.head_weights = model.vocab_size * model.hidden_size // tensor_parallel_size

    # Room

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices on a device; the embedding counts twice where it does not give the logits, too."""
        heads, layers, experts = 1 if self.model.tie_word_embeddings else 2, self.model.num_layers, self.model.experts
        dense = self._dense_layers(layers)
        weights = layers * self.attention_weights + dense * self.mlp_weights + heads * self.head_weights
        if experts:
            weights += (layers - dense) * (self.router_weights + experts.count * self.expert_weights)
        return self.itemsize * weights

    @property
    def kv_pair_bytes(self) -> int:
        """Bytes on a device of one KV pair in one layer, with its scales."""
        return self.pair_bytes("auto")

    def pair_bytes(self, kv_dtype: str) -> int:
        """The same as `kv_dtype` has it; "auto" is the pool's own."""
        if self.model.latent:  # values are the keys
            return self.key_bytes(kv_dtype)
        head_dim, kv_format = self.model.head_dim, KV_FORMATS.get(kv_dtype, self.kv_format)
        return self.kv_heads * (kv_format.pair_bytes(head_dim) if kv_format else 2 * head_dim * self.itemsize)

    def key_bytes(self, kv_dtype: str) -> int:
        """Of these, the bytes of the key."""
        head_dim, kv_format = self.model.head_dim, KV_FORMATS.get(kv_dtype, self.kv_format)
        return self.kv_heads * (kv_format.keys.vector_bytes(head_dim) if kv_format else head_dim * self.itemsize)

    def host_block_bytes(self, config: EngineConfig) -> int:
        """Bytes that a block of a device's pool takes in host memory."""
        compression = config.active_compression
        scores = 4 * self.kv_heads if compression is not None and compression.spec.reselects else 0
        layers = block_layers(config.kv_groups, self.model.num_layers)
        return layers * config.block_size * (self.pair_bytes(config.kv_offload_dtype) + scores)

    def host_chunk_bytes(self, config: EngineConfig) -> int:
        """Bytes that a chunk of a device's dropped KV pairs takes there, if they may come back."""
        compression = config.active_compression
        if compression is None or not compression.recalls:
            return 0
        beside = self.kv_heads * (POSITION_BYTES + ERROR_BYTES)
        return self.model.num_layers * CHUNK * (self.pair_bytes(compression.recall_dtype) + beside)

    def pool_blocks(
        self,
        block_size: int,
        memory_utilization: float,
        *,
        scored: bool = False,
        kv_groups: Sequence[KVGroup] = UNIFORM,
    ) -> int:
        """Blocks of a KV pool in what weights leave of `memory_utilization` of the memory.

        scored: a float32 score for each KV head lies beside every KV pair. kv_groups: see EngineConfig.

        Raises ConfigError if that is not a single block.
        """
        require(block_size >= 1, "block_size", block_size, "at least 1")
        require(0 < memory_utilization <= 1, "gpu_memory_utilization", memory_utilization, "above 0, at most 1")
        usable = self.hardware.memory_bytes * memory_utilization - self.hardware.reserved_bytes
        pair_bytes = self.kv_pair_bytes + (4 * self.kv_heads if scored else 0)
        layers = block_layers(kv_groups, self.model.num_layers)
        blocks = int(usable - self.weight_bytes) // (block_size * pair_bytes * layers)
        if blocks < 1:
            raise ConfigError(
                f"weights of {self.weight_bytes / 1e9:.1f} GB leave no room for a KV pool in {usable / 1e9:.1f} GB of "
                f"a device of {self.hardware.name!r}: raise tensor_parallel_size or gpu_memory_utilization"
            )
        return blocks

    @property
    def plans_ahead(self) -> bool:
        """Whether engines on the machine plan steps ahead."""
        return self.hardware.launch_seconds is not None

    # Time, in seconds

    def forward(
        self, decode: QueryBatch, prefill: QueryBatch, samples: int, *, planned_ahead: bool = False
    ) -> tuple[float, float]:
        """One step: the time that goes to decoding and to prefill tokens. Shared time is divided by tokens."""
        tokens, layers = decode.tokens + prefill.tokens, self.model.num_layers
        decoding, prefilling = self._attention(decode), self._attention(prefill)
        shared = self._matmuls(tokens, self.attention_weights, layers) + self.logits(samples)
        shared += layers * (2 * self._all_reduce(tokens) + self.hardware.layer_seconds)
        host = self._host(decode.sequences + prefill.sequences)
        if planned_ahead:
            launch = self.hardware.launch_seconds or 0.0 if self.devices > 1 else 0.0
            host = launch + max(0.0, host - launch - decoding - prefilling - shared)
        shared += host
        return decoding + shared * decode.tokens / tokens, prefilling + shared * prefill.tokens / tokens

    def _host(self, sequences: int) -> float:
        """Time of a step beside the model."""
        return self.hardware.step_seconds + sequences * self.hardware.sequence_seconds

    def logits(self, samples: int) -> float:
        """The head, and its float32 result brought together, written and read once."""
        if samples == 0:
            return 0.0
        result = 4 * samples * self.model.vocab_size
        return self._matmul(samples, self.head_weights) + self._gather(result) + 2 * result / self._bytes_per_s

    def recompute(self, queries: QueryBatch) -> float:
        """A pass that recovers queries: no keys, values or logits, and only queries in the last layer (Kara paper,
        appendix C.2). No layer has a window: after it nothing could be recovered."""
        layers = self.model.num_layers - 1
        layer = self._layer_attention(queries.visible, queries.read)
        layer += 2 * self._all_reduce(queries.tokens) + self.hardware.layer_seconds
        last = self._matmul(queries.tokens, self.q_weights) + self.hardware.layer_seconds
        return self._matmuls(queries.tokens, 2 * self.q_weights, layers) + layers * layer + last

    def score(self, products: int, keys: int, layers: int, *, at_once: bool) -> float:
        """Score and select in so many layers (Kara paper, eq. 4): `products` of a query and a key for each query head,
        from `keys` cached keys. at_once: all these layers are selected from together."""
        flops = 2 * self.query_heads * self.model.head_dim * products
        traffic = keys * (self.kv_pair_bytes if self.model.latent else self.kv_pair_bytes / 2)
        scoring = max(flops / self._score_flops, traffic / self._bytes_per_s)
        selections = 1 if at_once else layers
        return layers * (scoring + self.hardware.score_seconds) + selections * self.hardware.select_seconds

    def observe(self, scored: int, layers: int) -> float:
        """Add up scores in so many layers while sequences decode, for `scored` KV pairs that can be compressed: a
        product for each query head is written and read twice, a score for each KV head is read and written."""
        traffic = 4 * scored * (3 * self.query_heads + 2 * self.kv_heads)
        return layers * traffic / self._bytes_per_s

    def compact(self, kv_pairs: int, layers: int) -> float:
        """Move `kv_pairs`: read and write them in so many layers, at once."""
        moved = 2 * layers * kv_pairs * self.kv_pair_bytes
        return moved / self._bytes_per_s + self.hardware.layer_seconds

    def host_seconds(self, num_bytes: float) -> float:
        """Bring so many bytes to the host, or back. Where that is the same memory, they are read and written."""
        rate = self.hardware.host_bytes_per_s
        return num_bytes / rate if rate else 2 * num_bytes / self._bytes_per_s

    def recall(self, batch: RecallBatch, layers: int, kv_dtype: str) -> float:
        """Score residents and dropped KV pairs in so many layers, and exchange some. A score for each query head is
        written once and read twice, by a maximum and a sum. Dropped keys, and those that come back, pass the link.

        kv_dtype: of the dropped KV pairs.
        """
        flops = 2 * self.query_heads * self.model.head_dim * batch.products
        here = batch.resident * self.key_bytes("auto") + 12 * self.query_heads * batch.products
        there = batch.dropped * self.key_bytes(kv_dtype) + batch.exchanged * self.pair_bytes(kv_dtype)
        here += 2 * batch.exchanged * self.kv_pair_bytes
        rate = self.hardware.host_bytes_per_s
        if rate:
            traffic = max(here / self._bytes_per_s, there / rate)
        else:  # what leaves is written to the same memory, too
            traffic = (here + there + batch.exchanged * self.pair_bytes(kv_dtype)) / self._bytes_per_s
        return layers * (max(flops / self._score_flops, traffic) + self.hardware.recall_seconds)

    def _matmuls(self, tokens: int, weights: int, layers: int) -> float:
        """The products of the first `layers` layers: with `weights` of each, and with its MLP, or its router and the
        experts that are used."""
        dense, experts = self._dense_layers(layers), self.model.experts
        seconds = dense * self._matmul(tokens, weights + self.mlp_weights)
        if experts:
            weights += self.router_weights
            read = weights + experts.expected_used(tokens) * self.expert_weights
            multiplied = weights + experts.per_token * self.expert_weights
            seconds += (layers - dense) * self._matmul(tokens, multiplied, read)
        return seconds

    def _dense_layers(self, layers: int) -> int:
        """Those of the first `layers` layers that have no experts."""
        experts = self.model.experts
        return sum(layer < layers for layer in experts.dense_layers) if experts else layers

    def _matmul(self, tokens: int, weights: int, read: float | None = None) -> float:
        """Every token is multiplied with so many weights. read: weights that all tokens need together, if more."""
        traffic = self.itemsize * (weights if read is None else read)
        return max(2 * tokens * weights / self._matmul_flops, traffic / self._bytes_per_s)

    def _attention(self, queries: QueryBatch) -> float:
        """All layers."""
        seconds, full = 0.0, self.model.num_layers
        for window, attended in queries.sliding.items():
            layers = self.layers_of[window]
            seconds += layers * self._layer_attention(attended.visible, attended.read)
            full -= layers
        for layers, attended in queries.others.values():
            seconds += layers * self._layer_attention(attended.visible, attended.read)
            full -= layers
        return seconds + full * self._layer_attention(queries.visible, queries.read)

    def _layer_attention(self, visible: int, read: int) -> float:
        """A product with a key and one with a value for each visible KV pair, each KV pair read once."""
        flops = 4 * self.query_heads * self.model.head_dim * visible
        return max(flops / self._attention_flops, read * self.kv_pair_bytes / self._bytes_per_s)

    def _all_reduce(self, tokens: int) -> float:
        """Sum hidden states of `tokens` over the devices, in a ring: each byte travels twice, less the own part."""
        return 2 * self._exchange(tokens * self.model.hidden_size * self.itemsize) + self._latency

    def _gather(self, num_bytes: int) -> float:
        return self._exchange(num_bytes) + self._latency

    def _exchange(self, num_bytes: int) -> float:
        if self.devices == 1 or self.hardware.link_bytes_per_s is None:
            return 0.0
        return num_bytes * (self.devices - 1) / self.devices / self.hardware.link_bytes_per_s

    @property
    def _latency(self) -> float:
        return self.hardware.link_seconds if self.devices > 1 else 0.0


def resolve_dtype(dtype: str, model: ModelConfig, computed: Container[str] = ITEMSIZE) -> str:
    """The dtype that the engine computes in: "auto" is the checkpoint's own.

    computed: what a machine computes. One without float16, such as a CPU, runs it as float32.
    """
    dtype = model.dtype if dtype == "auto" else DTYPE_NAMES.get(dtype, dtype)
    return "float32" if dtype == "float16" and dtype not in computed else dtype


def _check(hardware: Hardware, model: ModelConfig, dtype: str, size: int) -> None:
    if model.recurrent is not None:
        raise ConfigError(
            f"{model.architecture} has recurrent layers, of whose time nothing is known here: simulate a model whose "
            "layers all have attention"
        )
    if model.two_sizes is not None:
        raise ConfigError(
            f"{model.architecture} has heads of two sizes, of whose time nothing is known here: simulate another model"
        )
    rates = hardware.flops_per_s
    require(dtype in ITEMSIZE, "dtype", dtype, f"choose one of {', '.join(ITEMSIZE)}")
    require(dtype in rates, "dtype", dtype, f"{hardware.name!r} has flops_per_s of {', '.join(rates)}")
    field, heads = "tensor_parallel_size", model.num_kv_heads
    require(1 <= size <= hardware.devices, field, size, f"1 to {hardware.devices}, the devices of {hardware.name!r}")
    require(heads % size == 0, field, size, f"a divisor of the model's {heads} KV heads")
