"""The files of an adapter, as PEFT writes them, checked against a model without reading any weight."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
from msgspec import Struct

from kvllm.errors import CheckpointError, RequestError
from kvllm.files.hub import HubId, fetch_files, hub_id
from kvllm.files.text_names import text_name
from kvllm.lora.request import Adapter, LoRARequest

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts in front of a module's name in a model for text."""
A, B = ".lora_A.weight", ".lora_B.weight"
ADAPTABLE = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj, or the fused ones of the checkpoint"
OF_CHANGED_BASE = ("pissa", "olora", "corda", "lora_ga")
"""Beginnings of the names of initializations that take the first product of the matrices away from the weights, which
an adapter then needs as they were changed."""
PEEKED = 16
"""Adapters whose check is remembered."""

Shapes = Mapping[str, tuple[int, int]]
"""Out and in features of each matrix that adapters may change, by its module, as `model.layers.0.mlp.up_proj`."""


class AdapterConfig(Struct, kw_only=True):
    """The keys of adapter_config.json that change what is computed, with PEFT's defaults."""

    peft_type: str = "LORA"
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str = "none"
    modules_to_save: list[str] | None = None
    use_dora: bool = False
    fan_in_fan_out: bool = False
    lora_bias: bool = False
    trainable_token_indices: Any = None
    target_parameters: Any = None
    alora_invocation_tokens: Any = None
    layer_replication: Any = None
    init_lora_weights: Any = True

    def rank(self, module: str) -> int:
        return _of_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """What the product of a module's two matrices is multiplied by."""
        alpha, rank = _of_pattern(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def refused(self) -> Iterator[str]:
        """The keys that ask for what is not computed, with the reason."""
        if self.peft_type != "LORA":
            yield f"peft_type={self.peft_type!r}: only LORA is computed"
        if self.bias != "none":
            yield f"bias={self.bias!r}: trained biases are not added"
        if self.modules_to_save:
            yield f"modules_to_save={self.modules_to_save!r}: whole modules are not replaced"
        if str(self.init_lora_weights).lower().startswith(OF_CHANGED_BASE):
            yield (
                f"init_lora_weights={self.init_lora_weights!r}: it needs the changed weights that it was trained with, "
                "unless PEFT saves it with path_initial_model_for_weight_conversion"
            )
        if self.use_dora:
            yield "use_dora=true: magnitudes are not computed"
        for name in (
            "fan_in_fan_out",
            "lora_bias",
            "trainable_token_indices",
            "target_parameters",
            "alora_invocation_tokens",
            "layer_replication",
        ):
            if getattr(self, name):
                yield f"{name}={getattr(self, name)!r}: not computed"


class Pair(Struct, frozen=True):
    """The two matrices of a module: names of their tensors in the file, their shapes, and the factor of their
    product."""

    a: str
    b: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    scale: float


class Adapters:
    """Opens adapters for a model. Any thread may call.

    shapes: of what they may change. max_rank: the largest allowed rank.
    """

    def __init__(self, shapes: Shapes, max_rank: int) -> None:
        self._shapes = shapes
        self._max_rank = max_rank
        self._known: dict[tuple[str, tuple[tuple[int, int], ...]], str] = {}
        self._folders: dict[str, Path] = {}
        self._lock = Lock()

    def open(self, request: LoRARequest) -> Adapter:
        """Check the files that a request names, which come from a hub for an id. The verdict is remembered until one of
        them is written again.

        Raises RequestError if files are missing or damaged, ask for what is not computed, or do not fit the model.
        """
        path = self._folder(request.lora_path)
        key = str(path), _stamp(path)
        digest = self._known.get(key)
        if digest is None:
            pairs = read_pairs(path)
            _check_shapes(path, pairs, self._shapes, self._max_rank)
            digest = content_digest(path)
            with self._lock:
                while len(self._known) >= PEEKED:
                    del self._known[next(iter(self._known))]
                self._known[key] = digest
        return Adapter(request.lora_name, str(path), digest)

    def _folder(self, given: str) -> Path:
        """The directory of an adapter. A hub is asked once for an id."""
        asked = hub_id(given)
        if asked is None:
            return Path(given).absolute()
        if given not in self._folders:
            try:
                self._folders[given] = fetch_adapter(asked)
            except CheckpointError as error:
                raise RequestError(f"lora_path={given!r}: {error}") from error
        return self._folders[given]


def fetch_adapter(asked: HubId) -> Path:
    """The directory of a hub's adapter, whose files are downloaded. Raises CheckpointError."""
    return fetch_files(asked, (CONFIG_FILE, WEIGHTS_FILE))


def read_pairs(path: Path) -> dict[str, Pair]:
    """The pairs of matrices of an adapter by the names of the modules that they change. Raises RequestError."""
    config = _read_config(path / CONFIG_FILE)
    with open_weights(path) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # not a dict
    modules = sorted({name.removesuffix(A).removesuffix(B) for name in shapes if name.endswith((A, B))})
    if others := sorted(name for name in shapes if not name.endswith((A, B))):
        raise RequestError(
            f"{path / WEIGHTS_FILE} has {_some(others)}: only lora_A and lora_B of matrices are computed"
        )
    if not modules:
        raise RequestError(f"{path / WEIGHTS_FILE} has no tensors: save the adapter again")
    if alone := [module for module in modules if not {module + A, module + B} <= shapes.keys()]:
        raise RequestError(f"{path / WEIGHTS_FILE} lacks lora_A or lora_B of {_some(alone)}: save the adapter again")
    found = {}
    for module in modules:
        name, a, b = module.removeprefix(PREFIX), module + A, module + B
        found[text_name(name) or name] = Pair(a, b, shapes[a], shapes[b], config.scale(name))
    _check_ranks(path, config, found)
    return found


def open_weights(path: Path) -> Any:
    """The open file of an adapter's weights, as safetensors has it. Raises RequestError."""
    from safetensors import SafetensorError, safe_open  # which imports torch

    file = path / WEIGHTS_FILE
    if not file.is_file():
        pickled = path / "adapter_model.bin"
        advice = "it is never loaded from pickle: save it as safetensors" if pickled.is_file() else "PEFT writes it"
        raise RequestError(f"{path} has no {WEIGHTS_FILE}: {advice}")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{file} cannot be read ({error}): it is damaged or incomplete, copy it again") from error


def content_digest(path: Path) -> str:
    """A name for the content of an adapter's files. Raises RequestError."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            with open(path / name, "rb") as file:
                while part := file.read(1 << 20):
                    digest.update(part)
        except OSError as error:
            raise RequestError(f"{path / name} cannot be read: {error}") from error
    return digest.hexdigest()


def _read_config(file: Path) -> AdapterConfig:
    try:
        config = msgspec.json.decode(file.read_bytes(), type=AdapterConfig)
        for key in (*(config.rank_pattern or ()), *(config.alpha_pattern or ())):
            re.compile(key)
    except FileNotFoundError:
        raise RequestError(f"{file.parent} has no {file.name}: give the directory that PEFT has written") from None
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, re.error) as error:
        raise RequestError(f"{file} is no configuration of an adapter: {error}") from error
    if refused := list(config.refused()):
        raise RequestError(f"{file}: {'; '.join(refused)}. Merge the adapter into the checkpoint")
    if min([config.r, *(config.rank_pattern or {}).values()]) < 1:
        raise RequestError(f"{file}: r={config.r} with rank_pattern={config.rank_pattern}: ranks are at least 1")
    return config


def _check_ranks(path: Path, config: AdapterConfig, pairs: dict[str, Pair]) -> None:
    """Hold the shapes of the matrices against the ranks of the configuration, which give the factors."""
    for module, pair in pairs.items():
        a, b, rank = pair.a_shape, pair.b_shape, config.rank(module)
        if len(a) != 2 or len(b) != 2 or not a[0] == b[1] == rank:
            raise RequestError(
                f"{path}: {module} has lora_A {list(a)} and lora_B {list(b)}, and {CONFIG_FILE} says rank {rank}: "
                "save the adapter again"
            )


def _check_shapes(path: Path, pairs: dict[str, Pair], shapes: Shapes, max_rank: int) -> None:
    if unknown := sorted(set(pairs) - set(shapes)):
        raise RequestError(
            f"{path} adapts {_some(unknown)}, which this model does not have or adapters do not change: they change "
            f"{ADAPTABLE}, of attention and of MLPs that are no experts"
        )
    for module, pair in pairs.items():
        a, b = pair.a_shape, pair.b_shape
        if a[0] > max_rank:
            raise RequestError(f"{path}: {module} has rank {a[0]}: max_lora_rank={max_rank} allows less, raise it")
        if (b[0], a[1]) != shapes[module]:
            raise RequestError(
                f"{path}: {module} has lora_A {list(a)} and lora_B {list(b)}, and the model's matrix is "
                f"{list(shapes[module])}: it is an adapter of another model"
            )


def _of_pattern(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first key that a module's name ends with: a whole name, or a regular expression of one."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return default


def _stamp(path: Path) -> tuple[tuple[int, int], ...]:
    """What changes when a file is written. Empty where one is missing."""
    try:
        stats = [(path / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except OSError:
        return ()
    return tuple((each.st_mtime_ns, each.st_size) for each in stats)


def _some(names: list[str]) -> str:
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")
