"""How the KV cache is compressed: the options, validated where they enter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from kvllm.compression.specs import AUTO, BY_WINDOW, FROM_ALL, QUERY_WINDOW, SPECS, MethodSpec, Option, known_methods
from kvllm.config.checks import Options, check_types, require
from kvllm.config.policies import POLICIES, PolicyOptions, check_largest, policy_options, policy_type
from kvllm.errors import ConfigError
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.groups import KVGroup, make_groups
from kvllm.spelling import did_you_mean

if TYPE_CHECKING:
    from kvllm.core.regions import Regions

DEFAULT_POLICY = "pressure"
RECALL_DTYPES = ("auto", *KV_FORMATS)


class LayerGroup(Struct, frozen=True):
    """Layers of a model that keep `retain_blocks` blocks of each window. layers: their indices, from 0."""

    layers: tuple[int, ...]
    retain_blocks: int


class CompressionConfig(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the KV cache is compressed while decoding.

    Options of the policy and of the method may stand beside these: `CompressionConfig(policy="pressure",
    window_blocks=3, method="kara", chunk_budget=16)` is `CompressionConfig(policy=Pressure(window_blocks=3),
    method="kara", method_options={"chunk_budget": 16})`. Other names are refused.

    Attributes:
        method: which KV pairs survive (`kvllm.compression.specs.SPECS`). "auto", for windows, is "mean_attention", or
            "snapkv" beside options that do not go with that: `compress_prompt` and recall.
        method_options: options of the method, by name, as its spec lists them, where they are not the default.
        policy: which sequences compress and when, one of the classes of `kvllm.core.policies`, or its name: `Pressure`
            (only while blocks are short), `Periodic` (every `period` decode steps), `Standalone` (each sequence
            whenever its tail fills a window) or `Threshold` (a sequence's whole cache, once it is too long).
        buffer: the last KV pairs of a window or of a cache, always kept.
        layer_groups: what groups of layers keep of each window, where it shall differ, instead of `retain_blocks`:
            `[{"layers": [0, 1, 2], "retain_blocks": 1}, {"layers": [3], "retain_blocks": 2}]`. Each layer that attends
            all tokens is in one of them. A layer that keeps less gives its blocks back to the pool. "auto" shares out
            `retain_blocks` of each layer so that the layers lose least, as the checkpoint's `kv_layer_losses.json` has
            it (`kvllm calibrate --layer-losses`). "pyramid" lets the shares fall from layer
            to layer, as PyramidKV does.
        recall_period: hold what is dropped in host memory (`kv_offloading_size`), and let what queries attend come
            back: at every token whose number in the text is a multiple, dropped KV pairs change places with residents
            of compressed windows that are attended less. 1: at every token. None: by `recall_bound`, or not at all.
        recall_bound: instead of a period, in every layer and head where more than this share of a query's attention may
            lie in dropped KV pairs.
        recall_chunks: most chunks of 16 KV pairs that come back at once, in every layer and KV head.
        recall_dtype: of the pairs in host memory: "auto" is the pool's, others as `kv_cache_dtype`.

    Raises ConfigError for what is not allowed.
    """

    method: str = AUTO
    method_options: dict[str, int | float] = msgspec.field(default_factory=dict)
    policy: Any = DEFAULT_POLICY
    buffer: int = 8
    layer_groups: tuple[LayerGroup, ...] | Literal["auto", "pyramid"] = ()
    recall_period: int | None = None
    recall_bound: float | None = None
    recall_chunks: int = 4
    recall_dtype: str = "auto"

    if TYPE_CHECKING:  # it takes the options of policy and method, too

        def __init__(self, **options: Any) -> None: ...

    @classmethod
    def sorted_out(cls, options: dict[str, Any]) -> dict[str, Any]:
        """What is no field is an option of the policy, where this is named, or of the method."""
        found = {name: value for name, value in options.items() if name in cls.__struct_fields__}
        more = {name: value for name, value in options.items() if name not in found}
        policy = found.get("policy", DEFAULT_POLICY)
        if isinstance(policy, str):
            own = policy_type(policy)
            found["policy"] = own(**{name: more.pop(name) for name in own.__struct_fields__ if name in more})
        elif isinstance(policy, PolicyOptions):
            for name in more.keys() & set(policy.__struct_fields__):
                require(False, name, more[name], f"write it into policy={type(policy).__name__}({name}=...)")
        return found | ({"method_options": {**found.get("method_options", {}), **more}} if more else {})

    def flat(self) -> dict[str, Any]:
        """The options that are not the default, those of policy and method among the others."""
        fields = {field.name: field for field in msgspec.structs.fields(self)}
        kept = fields.keys() - {"policy", "method_options"}
        found = {name: getattr(self, name) for name in fields if name in kept}
        found = {name: value for name, value in found.items() if value != fields[name].default}
        own = {field.name: field.default for field in msgspec.structs.fields(self.policy)}
        settings = {name: getattr(self.policy, name) for name in own if getattr(self.policy, name) != own[name]}
        policy = {} if self.policy.name == DEFAULT_POLICY else {"policy": self.policy.name}
        return found | policy | settings | self.method_options

    def __post_init__(self) -> None:
        force_setattr(self, "policy", policy_options(self.policy))
        check_types(self)
        known = (AUTO, *known_methods(self.method))
        require(self.method in known, "method", self.method, f"choose one of {', '.join(known)}")
        check_largest(self)
        require(self.buffer >= 0, "buffer", self.buffer, "at least 0")
        if self.method == AUTO and self.policy.compresses == "cache":
            allowed = f'only with windows: policy="{self.policy.name}" needs the name of a method, such as "keydiff"'
            require(False, "method", self.method, allowed)
        refusal = self.spec.refusal(self.policy.compresses)
        require(refusal is None, "method", self.method, refusal or "")
        self._check_method_options()
        if self.spec.queries == "buffer":
            needed = f"at least 1: method={self.method!r} scores with its queries"
            require(self.buffer >= 1, "buffer", self.buffer, needed)
        if self.spec.reselects:
            observed = f"only without it: method={self.method!r} adds its scores up while sequences decode"
            require(not self.compress_prompt, "compress_prompt", True, observed)
        if self.layer_groups:
            self._check_layer_groups()
        self._check_recall()
        self.policy.check(self)

    def _check_method_options(self) -> None:
        """Hold them against the method's spec, and leave out those that are the default."""
        own = {option.name: option for option in self.spec.settings}
        for name, value in self.method_options.items():
            if name not in own:
                raise ConfigError(self._unknown(name, value, own))
            require(own[name].accepts(value), name, value, own[name].allowed)
        given = {name: value for name, value in self.method_options.items() if value != own[name].default}
        force_setattr(self, "method_options", given)

    def _unknown(self, name: str, value: Any, own: dict[str, Option[Any]]) -> str:
        """What is wrong with an option that neither the policy nor the method has."""
        names = {
            f"policy={self.policy.name!r}": self.policy.__struct_fields__,
            f"method={self.spec.name!r}": tuple(own) or ("no option",),
            "every compression": self.__struct_fields__,
        }
        near = did_you_mean(name, [each for group in names.values() for each in group])
        if near and not is_option(name):
            return f"CompressionConfig has no option {name!r}{near}"
        lists = "; ".join(f"{owner} has {', '.join(group)}" for owner, group in names.items())
        return f"{name}={value!r} is not allowed: {lists}"

    def _check_layer_groups(self) -> None:
        seen = set[int]()
        for group in self.named_groups:
            require(bool(group.layers), "layer_groups: layers", [], "at least one layer")
            for layer in group.layers:
                require(layer >= 0, "layer_groups: layers", layer, "indices of layers, from 0")
                require(layer not in seen, "layer_groups: layers", layer, "each layer once, and this one stands twice")
                seen.add(layer)
        windows = "not beside layer_groups, which are for windows: a threshold cuts a cache to budget_tokens"
        require(self.policy.compresses != "cache", "policy", self.policy.name, windows)
        places = "not beside layer_groups, because it needs KV pairs to be in the same place in all layers"
        require(not self.spec.reads_mass, "method", self.method, places)

    @property
    def named_groups(self) -> tuple[LayerGroup, ...]:
        """`layer_groups`; none while these are to be found."""
        return () if isinstance(self.layer_groups, str) else self.layer_groups

    def retained_by_layer(self, windows: Sequence[int | None]) -> list[int | None] | None:
        """Blocks of a window that each layer of a model keeps; None if `layer_groups` does not say.

        windows: of each layer, None for those that attend all tokens and are compressed.

        Raises ConfigError unless `layer_groups` names these layers, and no others.
        """
        if not self.named_groups:
            return None
        found: list[int | None] = [None] * len(windows)
        for group in self.named_groups:
            for layer in group.layers:
                known = f"the model has layers 0 to {len(windows) - 1}"
                require(layer < len(windows), "layer_groups: layers", layer, known)
                window = windows[layer]
                sliding = f"this layer attends the last {window} tokens alone, and is not compressed: leave it out"
                require(window is None, "layer_groups: layers", layer, sliding)
                found[layer] = group.retain_blocks
        missing = [layer for layer, window in enumerate(windows) if window is None and found[layer] is None]
        require(not missing, "layer_groups", self.layer_groups, f"layers {missing} are in no group: add them")
        return found

    def _check_recall(self) -> None:
        period, bound = self.recall_period, self.recall_bound
        require(period is None or period >= 1, "recall_period", period, "at least 1, or None")
        require(bound is None or 0 <= bound < 1, "recall_bound", bound, "a share, at least 0 and less than 1, or None")
        require(period is None or bound is None, "recall_bound", bound, f"None with recall_period={period}: give one")
        require(self.recall_chunks >= 1, "recall_chunks", self.recall_chunks, "at least 1")
        dtypes = f"choose one of {', '.join(RECALL_DTYPES)}"
        require(self.recall_dtype in RECALL_DTYPES, "recall_dtype", self.recall_dtype, dtypes)
        spec = self.spec
        for name, default in () if self.recalls else (("recall_chunks", 4), ("recall_dtype", "auto")):
            value = getattr(self, name)
            require(value == default, name, value, "only with recall_period or recall_bound")
        if self.recalls:
            moves = spec.ragged or spec.reads_mass or spec.keeps_end or spec.reselects
            allowed = "with recall_period or recall_bound, a method that keeps equally many KV pairs in all heads, and "
            allowed += "no numbers beside them between compressions"
            require(not moves, "method", self.method, allowed)

    @property
    def spec(self) -> MethodSpec:
        """Facts about the method that the engine reads."""
        return SPECS[self._chosen]

    @property
    def _chosen(self) -> str:
        """The method, also where "auto" is given."""
        if self.method != AUTO:
            return self.method
        again = self.policy.compresses == "windows" and not (self.compress_prompt or self.recalls)
        return FROM_ALL if again else BY_WINDOW

    def with_method(self) -> CompressionConfig:
        """The same with a method instead of "auto"."""
        return msgspec.structs.replace(self, method=self._chosen)

    @property
    def recalls(self) -> bool:
        """Whether dropped KV pairs may come back."""
        return self.recall_period is not None or self.recall_bound is not None

    def recalls_in(self, logical_length: int, num_tokens: int) -> bool:
        """Whether a step that computes `num_tokens` after `logical_length` tokens of a text may recall something: it
        computes a multiple of the period. Counted in the text, so that batch mates change nothing."""
        period = self.recall_period or 1
        return (logical_length + num_tokens) // period > logical_length // period

    @property
    def compress_prompt(self) -> bool:
        """Whether the policy compresses windows of prompts, too."""
        return getattr(self.policy, "compress_prompt", False)

    @property
    def query_window(self) -> int:
        """The most recent queries that score, for methods which do not use all (SnapKV and its kin)."""
        return int(self.method_options.get(QUERY_WINDOW.name, QUERY_WINDOW.default))

    @property
    def options(self) -> dict[str, int | float]:
        """The options of the method's function, by name."""
        defaults: dict[str, int | float] = {option.name: option.default for option in self.spec.options}
        return {name: self.method_options.get(name, default) for name, default in defaults.items()}

    def regions(self, block_size: int, retain: int | None = None) -> Regions:
        """What of a sequence can be compressed, for sequences without a budget of their own.

        retain: KV pairs kept of a window, where a request or a group of layers says so.

        Raises:
            ConfigError: the window, what is kept of it and the buffer do not fit into each other at this block size.
        """
        return self.policy.regions(self, block_size, retain)

    def keeps_all(self, block_size: int) -> bool:
        """Whether nothing would ever be dropped (retention 100%)."""
        return self.regions(block_size).keeps_all

    def retained(self, block_size: int) -> int:
        """KV pairs kept of a window, buffer included; of the whole cache by threshold. With `layer_groups`, those of
        the layers that keep least. Raises ConfigError as `regions`."""
        return self.regions(block_size).retain


def option_types(policy: Any = DEFAULT_POLICY, method: Any = AUTO) -> dict[str, Any]:
    """The type of each option of the flat form, by name. Raises ConfigError for the name of no policy."""
    kinds = (CompressionConfig, policy_type(policy)) if isinstance(policy, str) else (CompressionConfig,)
    types = {field.name: field.type for kind in kinds for field in msgspec.structs.fields(kind)}
    known_methods(method)
    specs = (SPECS[name] for name in ((FROM_ALL, BY_WINDOW) if method == AUTO else (method,)) if name in SPECS)
    return types | {option.name: type(option.default) for spec in specs for option in spec.settings}


def is_option(name: str) -> bool:
    """Whether a policy or a method has an option of that name."""
    of_policies = (policy.options_type.__struct_fields__ for policy in POLICIES.values())
    of_methods = ([option.name for option in spec.settings] for spec in SPECS.values())
    return any(name in names for names in (*of_policies, *of_methods))


def bounding(windows: Sequence[int | None], max_model_len: int) -> list[int | None]:
    """The windows of layers; one that holds the longest text is none."""
    return [window if window is not None and window < max_model_len else None for window in windows]


def make_kv_groups(windows: Sequence[int | None], compression: CompressionConfig | None) -> tuple[KVGroup, ...]:
    """The KV groups of a model with these windows, by layer, under a compression.

    Raises ConfigError as `CompressionConfig.retained_by_layer`.
    """
    return make_groups(windows, compression.retained_by_layer(windows) if compression else None)
