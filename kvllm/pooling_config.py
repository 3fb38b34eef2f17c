"""What a checkpoint is read for beside text: embeddings, scores or classes, and how its files say they are made.

These are `config.json`, and the modules of sentence-transformers: `modules.json` lists folders, each with a
`config.json` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from kvllm.config import require
from kvllm.config.checks import Options, check_types
from kvllm.errors import CheckpointError
from kvllm.files.checkpoint import checkpoint_folder, open_checkpoint
from kvllm.models import CLASSIFIER

RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify")
POOLING_TYPES = ("LAST", "MEAN", "CLS")
Activation = Literal["Identity", "Normalize", "Sigmoid", "Softmax", "Tanh", "ReLU", "GELU"]
Pooling = Literal["LAST", "MEAN", "CLS"]
MODES = {"lasttoken": "LAST", "mean": "MEAN", "cls": "CLS"}
"""Of sentence-transformers."""
LEGACY_MODES = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
PROBLEMS: dict[str, Activation] = {
    "regression": "Identity",
    "single_label_classification": "Softmax",
    "multi_label_classification": "Sigmoid",
}
MOST_LABELS = 1 << 20


class PoolerConfig(Options, frozen=True, kw_only=True):
    """How vectors are made, instead of what the checkpoint says.

    pooling_type, seq_pooling_type: "LAST", "MEAN" or "CLS", the first token. use_activation, normalize: whether
        embeddings are normalized, and scores of classes become probabilities, where a request does not say.
    """

    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    use_activation: bool | None = None
    normalize: bool | None = None

    def __post_init__(self) -> None:
        check_types(self)
        require(self.pooling in (None, *POOLING_TYPES), "pooling_type", self.pooling, ", ".join(POOLING_TYPES))

    @property
    def pooling(self) -> Any:
        return self.seq_pooling_type if self.pooling_type is None else self.pooling_type

    @property
    def activates(self) -> bool | None:
        return self.normalize if self.use_activation is None else self.use_activation


class Dense(Struct, frozen=True):
    """A linear layer after pooling. file: of its weights."""

    file: Path
    in_features: int
    out_features: int
    activation: Activation


class ScoreRows(Struct, frozen=True):
    """The rows of the head for text that make scores: of token ids, or of texts that are tokens.

    difference: one score, of the last of two tokens less the first.
    """

    tokens: tuple[int | str, ...]
    difference: bool


class PoolingConfig(Struct, frozen=True, kw_only=True):
    """How a model's hidden states become what a request asks for.

    task: "embed" for vectors, "classify" for scores of classes.
    pooling: which of a prompt's hidden states are taken. dense: layers after that.
    activation: of vectors, or of the scores of classes; score_activation: of the one score of a pair.
    activates: whether it is applied where a request does not say.
    labels: of the classes. score_rows: None if the checkpoint has a matrix of scores.
    dimensions: to which embeddings may be cut, none for any; None if they may not be.
    """

    task: Literal["embed", "classify"]
    pooling: Pooling
    activation: Activation
    score_activation: Activation = "Sigmoid"
    activates: bool = True
    dense: tuple[Dense, ...] = ()
    labels: tuple[str, ...] = ()
    score_rows: ScoreRows | None = None
    dimensions: tuple[int, ...] | None = None


class _Module(Struct):
    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


class _Keys(Struct):
    """Those of `config.json` that say how hidden states are used, with vLLM's own, which `hf_overrides` may add."""

    architectures: list[str] | None = None
    num_labels: int | None = None
    id2label: dict[str, str] | None = None
    problem_type: str | None = None
    sentence_transformers: dict[str, Any] | None = None
    sbert_ce_default_activation_function: str | None = None
    classifier_from_token: list[str] | None = None
    is_original_qwen3_reranker: bool = False
    method: str | None = None
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] | None = None


class _DenseKeys(Struct):
    in_features: int
    out_features: int
    activation_function: str = "torch.nn.modules.activation.Tanh"


class _LogitKeys(Struct):
    true_token_id: int
    false_token_id: int | None = None


def read_pooling(
    path: Path,
    overrides: dict[str, Any] | None = None,
    runner: str = "auto",
    convert: str = "auto",
    pooler: PoolerConfig | None = None,
) -> PoolingConfig | None:
    """How the checkpoint `path` is pooled, None if it generates text.

    overrides: keys with other values than `config.json` has. runner: one of RUNNERS; "auto" pools classifiers and what
        sentence-transformers has saved. convert: one of CONVERSIONS, for what a model of text is pooled.

    Raises CheckpointError for a malformed file, and for what is not computed.
    """
    if runner == "generate":
        return None
    checkpoint, folder = open_checkpoint(path), checkpoint_folder(path)
    try:
        keys = msgspec.convert(checkpoint.config() | (overrides or {}), _Keys)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{checkpoint.config_file}: {error}") from error
    modules = {module.kind: folder / module.path for module in _modules(folder)}
    classifies = any(name.endswith(CLASSIFIER) for name in keys.architectures or ()) or "LogitScore" in modules
    asked = runner == "pooling" or convert in ("embed", "classify") or pooler is not None
    if not (asked or classifies or "Pooling" in modules):
        return None
    pooler = pooler or PoolerConfig()
    activates = pooler.activates is not False
    if convert == "classify" or (classifies and convert != "embed"):
        return _classifier(keys, modules, pooler.pooling or "LAST", activates)
    pooled = pooler.pooling or (_pooling(modules["Pooling"]) if "Pooling" in modules else "LAST")
    if modules and pooler.activates is None:
        activates = "Normalize" in modules
    any_size = () if keys.is_matryoshka else None
    return PoolingConfig(
        task="embed",
        pooling=pooled,
        activation="Normalize",
        activates=activates,
        dense=tuple(_dense(folder)),
        dimensions=any_size if keys.matryoshka_dimensions is None else tuple(keys.matryoshka_dimensions),
    )


def _classifier(keys: _Keys, modules: dict[str, Path], pooling: Pooling, activates: bool) -> PoolingConfig:
    rows = _score_rows(keys, modules)
    count = keys.num_labels if keys.num_labels is not None else len(keys.id2label) if keys.id2label else 2
    if rows is not None:
        count = 1 if rows.difference else len(rows.tokens)
    if not 1 <= count <= MOST_LABELS:
        raise CheckpointError(f"num_labels is {count}, but must be at least 1 and at most {MOST_LABELS}")
    names = keys.id2label or {}
    trained = _own_activation(keys)
    default: Activation = "Sigmoid" if count == 1 else "Softmax"
    if keys.problem_type not in (None, "", *PROBLEMS):
        raise CheckpointError(f"problem_type is {keys.problem_type!r}, but must be one of {', '.join(PROBLEMS)}")
    return PoolingConfig(
        task="classify",
        pooling=pooling,
        activation=PROBLEMS.get(keys.problem_type or "", trained or default),
        score_activation=trained or "Sigmoid",
        activates=activates,
        labels=tuple(names.get(str(i), f"LABEL_{i}") for i in range(count)),
        score_rows=rows,
    )


def _score_rows(keys: _Keys, modules: dict[str, Path]) -> ScoreRows | None:
    """What makes scores of the head for text, if a key of vLLM's or a module of sentence-transformers says so."""
    named = keys.classifier_from_token
    if named:
        difference = keys.is_original_qwen3_reranker or keys.method == "from_2_way_softmax"
        if difference and len(named) != 2:
            raise CheckpointError(f"classifier_from_token is {named}, but must name two tokens: of no and of yes")
        return ScoreRows(tuple(named), difference)
    if "LogitScore" not in modules:
        return None
    found = _read(modules["LogitScore"] / "config.json", _LogitKeys)
    both = (found.true_token_id,) if found.false_token_id is None else (found.false_token_id, found.true_token_id)
    return ScoreRows(both, len(both) == 2)


def _own_activation(keys: _Keys) -> Activation | None:
    """The activation that sentence-transformers has trained a cross encoder with."""
    name = (keys.sentence_transformers or {}).get("activation_fn") or keys.sbert_ce_default_activation_function
    return None if name is None else _activation(name)


def _activation(name: str) -> Activation:
    """From the name of a class of torch."""
    kind: Any = name.rpartition(".")[2]
    if not name.startswith("torch.nn.") or kind not in ("Identity", "Sigmoid", "Softmax", "Tanh", "ReLU", "GELU"):
        raise CheckpointError(f"the activation function {name!r} is not supported: use another checkpoint")
    return kind


def _modules(folder: Path) -> list[_Module]:
    file = folder / "modules.json"
    return _read(file, list[_Module]) if file.is_file() else []


def _pooling(folder: Path) -> Pooling:
    file = folder / "config.json"
    keys: dict[str, Any] = _read(file, dict[str, Any])
    given = keys.get("pooling_mode") or [mode for key, mode in LEGACY_MODES.items() if keys.get(key)]
    modes = [given] if isinstance(given, str) else list(given)
    if len(modes) != 1 or modes[0] not in MODES:
        raise CheckpointError(
            f"{file} pools by {', '.join(map(str, modes)) or 'nothing'}, which kvllm does not compute: it has one of "
            f'{", ".join(MODES)}. Give another, as pooler_config={{"pooling_type": "MEAN"}}, or use another checkpoint'
        )
    return MODES[modes[0]]  # type: ignore[return-value]


def _dense(folder: Path) -> Iterator[Dense]:
    """The layers of an embedding model, in their order."""
    known = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
    for module in _modules(folder):
        if module.kind not in known:
            raise CheckpointError(f"{folder / 'modules.json'} has a module {module.kind}: kvllm has {', '.join(known)}")
        if module.kind == "Dense":
            keys = _read(folder / module.path / "config.json", _DenseKeys)
            file = folder / module.path / "model.safetensors"
            yield Dense(file, keys.in_features, keys.out_features, _activation(keys.activation_function))


def _read(file: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}: download it again") from error
