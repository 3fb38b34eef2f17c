"""The one list of compression methods: their needs from the engine, and their options. Free of torch.

A method is a spec and a function, which `register` adds to the list: docs/add-a-method.md has the recipe. Those of the
package have their functions in `kvllm/compression/methods/<name>.py`, which are imported when they are called. The
configuration, the policies, the workers and the simulator read the facts of all methods here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from kvllm.entry_points import load_entry_points
from kvllm.errors import ConfigError

Function = Callable[..., Any] | str
"""A function, or where it is, as `module:name` in `kvllm.compression.methods`: a spec imports no torch."""
Queries = Literal["window", "buffer", "recent", "none"]
KeysRead = Literal["copied", "paged", "shape"]
Compresses = Literal["windows", "overlapping windows", "cache"]
"""What a policy lets a method choose from: windows one after the other, windows that share their buffers, or all that a
sequence holds, also what it was compressed to before."""
Number = TypeVar("Number", int, float)
LARGEST = (1 << 31) - 1
"""Of whole numbers: operators count KV pairs in 32 bits."""


@dataclass(frozen=True, slots=True)
class Option(Generic[Number]):
    """A number that a user sets for a method, and the method's function gets as a keyword argument.

    least, most: bounds; both are allowed values.
    """

    name: str
    default: Number
    least: Number
    most: Number | None = None

    def accepts(self, value: float) -> bool:
        """Whether `value` lies within the bounds, and is whole where the default is."""
        if isinstance(self.default, int) and not (isinstance(value, int) and value <= LARGEST):
            return False
        return self.least <= value and (self.most is None or value <= self.most)

    @property
    def allowed(self) -> str:
        bounds = f"at least {self.least}" if self.most is None else f"between {self.least} and {self.most}"
        return bounds + (", a whole number of 31 bits" if isinstance(self.default, int) else "")


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """Facts about a method that the engine reads.

    name: as in `CompressionConfig(method=...)`. summary: the KV pairs that it keeps, in a few words.
    queries: the tokens of a region whose queries it needs: "window" (all of them), "buffer" (the buffer's), "recent"
        (the last `query_window`), "none".
    options: set by users; keyword arguments of its function.
    ragged: layers or heads keep different numbers of KV pairs. That goes with policy "threshold" alone.
    reselects: a window is chosen from together with what earlier compressions of the sequence's output left. It needs
        squares of attention probabilities, which are added up while sequences decode, from a pair's own query on.
    reads_mass: it needs the attention that every KV pair has received so far. This sum belongs to one sequence, so
        sequences share no prefixes.
    repeats: it needs the attention that the text of a region pays to its KV pairs when it is repeated after them. That
        takes a pass of the model over the text.
    whole_layer: it compares the KV heads of a layer, or numbers them, so it must see all of them at once.
    unrotates: it takes the rotation off keys, for which it needs the position of each. KV pairs that were compressed
        before have none that is known.
    calibrated: it needs statistics of the model's queries, from a file beside the checkpoint.
    gated: it needs gates that were trained for the model, from a file beside the checkpoint.
    keys: how its functions read keys: in a copy; as `PagedKeys`, too, where kernels can read the blocks of the cache;
        or their shape alone, of `PagedKeys` in any case.
    keeps_end: the end of the region survives, so nothing moves where whole blocks are dropped.
    function: what chooses; of the package's own, by default, `<name>:select`.
    scores: the first half of that function, if an event may call it for each layer, and `token2chunk.choose` once for
        all layers. It takes queries and keys, inputs and options by name.
    """

    name: str
    summary: str
    queries: Queries = "none"
    options: tuple[Option[Any], ...] = ()
    ragged: bool = False
    reselects: bool = False
    reads_mass: bool = False
    repeats: bool = False
    whole_layer: bool = False
    unrotates: bool = False
    calibrated: bool = False
    gated: bool = False
    keys: KeysRead = "copied"
    keeps_end: bool = False
    function: Function = ""
    scores: Function = ""

    @property
    def reads_cache_alone(self) -> bool:
        """Whether what is cached of a region is enough, without a pass of the model and without what passed by."""
        return self.queries == "none" and not self.reads_mass and not self.repeats

    @property
    def reads_file(self) -> bool:
        """Whether it needs a file beside the checkpoint."""
        return self.calibrated or self.gated

    @property
    def settings(self) -> tuple[Option[Any], ...]:
        """What a user may set: the options, and how many queries score where these are the recent ones."""
        return (*self.options, QUERY_WINDOW) if self.queries == "recent" else self.options

    def own(self, **options: float) -> dict[str, float]:
        """Those of some options that the method has."""
        return {option.name: options[option.name] for option in self.settings if option.name in options}

    def refusal(self, compresses: Compresses) -> str | None:
        """Why policies that compress this cannot use the method; None if they can."""
        if compresses == "cache" and self.queries == "window":
            return (
                "it scores with the query of every KV pair, and those that were compressed before have none: use "
                'policy="pressure" or "periodic", or method="kara_no_bi"'
            )
        if compresses == "cache" and self.unrotates:
            return (
                "it needs the position of every KV pair, and those that were compressed before differ from head to "
                'head: use policy="pressure" or "periodic"'
            )
        if compresses == "overlapping windows" and self.reselects:
            return (
                "its scores are added up while sequences decode, and a window is chosen from together with what is "
                'left of those before: use policy="pressure", "periodic" or "threshold"'
            )
        if compresses != "cache" and self.ragged:
            return (
                'it keeps more in some layers or heads than in others: use policy="threshold", or another method with '
                "layer_groups, by which layers keep different shares of a window"
            )
        return None


AUTO = "auto"
"""A name for `FROM_ALL`, or for `BY_WINDOW` where other options do not let a method choose again from what it kept."""
FROM_ALL, BY_WINDOW = "mean_attention", "snapkv"
STATISTICS_FILE = "kv_statistics.safetensors"

CHUNK_BUDGET = Option("chunk_budget", default=32, least=0)
MAX_CHUNK = Option("max_chunk", default=8, least=3)
TOKEN2CHUNK = (CHUNK_BUDGET, MAX_CHUNK)
QUERY_WINDOW = Option("query_window", default=32, least=1)
FUTURE = Option("future", default=512, least=1, most=1 << 16)
RECENT = Option("recent", default=64, least=0)
SINKS = Option("sinks", default=4, least=0)

SPECS: dict[str, MethodSpec] = {}
"""All methods that are known, by name."""
_RESERVED = {AUTO}
ENTRY_POINTS = "kvllm.methods"
"""The entry point group of packages with methods. An entry names a module that calls `register`."""


def register(spec: MethodSpec, function: Function) -> None:
    """Add a method to the list. One of another package that has the name is replaced.

    function: what chooses the KV pairs of a region, called as `kvllm.compression.registry.Method` says.

    Raises:
        ConfigError: for the name of a method of this package.
    """
    if spec.name in _RESERVED:
        raise ConfigError(f"a method {spec.name!r} is part of KvLLM: register yours by another name")
    SPECS[spec.name] = replace(spec, function=function)


def known_methods(wanted: str) -> tuple[str, ...]:
    """The names of all methods. Those of other packages are loaded first if `wanted` is not among the others.

    Raises:
        ConfigError: if a package with methods cannot be imported.
    """
    if wanted not in SPECS:
        load_entry_points(ENTRY_POINTS)
    return tuple(SPECS)


_OWN = (
    MethodSpec(
        "kara",
        "what all queries of a window attend to; best tokens and chunks",
        "window",
        TOKEN2CHUNK,
        scores="kara:scores",
        keys="paged",
    ),
    MethodSpec(
        "mean_attention",
        "the largest mean square of what its value adds to a query (ours)",
        options=(RECENT,),
        reselects=True,
        keys="shape",
    ),
    MethodSpec(
        "kara_no_bi",
        "Kara by the buffer's queries alone",
        "buffer",
        TOKEN2CHUNK,
        function="kara:select",
        scores="kara:scores",
        keys="paged",
    ),
    MethodSpec(
        "kara_no_token2chunk",
        "Kara without chunks",
        "window",
        function="kara:select_tokens",
        scores="kara:scores",
        keys="paged",
    ),
    MethodSpec("snapkv", "what the last queries attend to, smoothed", "recent", scores="snapkv:scores"),
    MethodSpec(
        "rkv",
        "what the last queries attend to, less what is said again",
        "recent",
        (Option("mix", 0.1, 0.0, 1.0),),
        scores="rkv:scores",
    ),
    MethodSpec("keydiff", "the keys that differ most from the mean key", keys="paged"),
    MethodSpec(
        "expected_attention",
        "what queries like the last ones will attend to",
        "recent",
        (FUTURE, SINKS),
        scores="expected_attention:region_scores",
    ),
    MethodSpec(
        "expected_attention_calibrated",
        "what queries like those of a text will attend to",
        options=(FUTURE, SINKS),
        calibrated=True,
        function="expected_attention:select_calibrated",
    ),
    MethodSpec(
        "triattention",
        "keys at distances that queries prefer, and long ones",
        options=(Option("future", 65536, 1),),
        calibrated=True,
    ),
    MethodSpec("dms", "what gates would not drop that were trained to", unrotates=True, gated=True),
    MethodSpec("trimkv", "what trained gates hold on to longest", unrotates=True, gated=True),
    MethodSpec("kvzip", "what the text is repeated from", repeats=True),
    MethodSpec("streaming", "the first KV pairs, the attention sinks, and the last", options=(SINKS,), keys="shape"),
    MethodSpec("pyramidkv", "SnapKV; the budget falls from layer to layer", "recent", ragged=True),
    MethodSpec("adakv", "SnapKV; the budget moves between heads", "recent", ragged=True, whole_layer=True),
    MethodSpec("chunkkv", "SnapKV's scores by chunk", "recent", (Option("chunk", 10, 1),), whole_layer=True),
    MethodSpec("h2o", "what all queries so far attended to", reads_mass=True, keys="shape"),
    MethodSpec("sliding_window", "the last KV pairs", keeps_end=True, keys="shape"),
    MethodSpec("random", "KV pairs by lot: what any method has to beat", whole_layer=True),
)

for own in _OWN:
    register(own, own.function or f"{own.name}:select")
_RESERVED |= set(SPECS)
