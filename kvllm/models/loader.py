"""Fills a model with the weights of a checkpoint, or with random ones.

Every tensor's name, dtype and shape is checked from the files' headers before the model is allocated. A rank reads its
own part of each tensor, some rows at a time, and packs them at once, so that no second copy of the weights is held.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from kvllm.errors import CheckpointError, ConfigError
from kvllm.files.checkpoint import open_checkpoint
from kvllm.files.directory import some
from kvllm.files.groups import GroupedTensor, GroupForm
from kvllm.files.tensor import CheckpointTensor
from kvllm.models import model_family
from kvllm.models.base import Decoder
from kvllm.models.config import ModelConfig
from kvllm.models.expert_stacks import ExpertMatrices
from kvllm.models.layers import Weight
from kvllm.models.mtp import MTPDecoder
from kvllm.models.multimodal import text_tensors
from kvllm.models.quantized_tensors import UNREAD, Stored, read_float8, read_integers, read_mxfp4, stored_tensors
from kvllm.models.weight_format import WeightFormat
from kvllm.models.weights import LinearWeight, MatrixRows, Packing, strips
from kvllm.parallel import Shard

READABLE_DTYPES = ("BF16", "F16", "F32", "F64")
EMBEDDING, HEAD, BASE = "model.embed_tokens.weight", "lm_head.weight", "model."
SCORE = "score.weight"
"""The matrix of a classifier `[labels, hidden_size]`."""

Tensors = Mapping[str, CheckpointTensor]
"""Every tensor of a checkpoint by name."""


def load_model(
    path: Path,
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    bits: int | None = None,
    expand: bool = False,
) -> Decoder:
    """The model of the checkpoint `path`, converted to `dtype`, or with weights of 8 or 4 `bits`.

    Without `bits`, matrices that a file has as integers in groups stay so, unless `expand` is true.

    Raises CheckpointError if there are no files of weights, one lies outside of `path` or cannot be read, or they hold
    other tensors than `config` implies; ConfigError if the ranks cannot share the model out equally.
    """
    checkpoint = open_checkpoint(path)
    with checkpoint.open_tensors() as opened:
        found = of_whole_model(text_tensors(opened) if config.text_of else opened)
        found = _without_extra_layers(found, config)
        if unused := model_family(config.architecture).unused:
            found = {name: found[name] for name in found.keys() - set(unused(config, list(found)))}
        if not config.generates:
            found = {name: tensor for name, tensor in found.items() if name not in (HEAD, SCORE)}
        without_memory = empty_model(config, shard, dtype, torch.device("meta"), max_model_len=1)
        quantized = _quantized(without_memory.weights(), found, config.weight_format)
        stored = _stored(without_memory.weights(), quantized, found)
        found = _without_zero_biases(found, stored)
        _check(stored, found, config, checkpoint.config_file.name)
        if config.tie_word_embeddings and HEAD in found:
            _check_tied_head(without_memory.weights()[EMBEDDING], found, dtype)
        model = empty_model(config, shard, dtype, device, max_model_len)
        if not (bits or expand):
            _hold_as_in_file(model.weights(), found)
            _hold_integers(model.weights(), quantized)
        model.allocate(Packing(bits))
        model.weights_note = _weights_note(model.weights(), found, f"int{bits}" if bits else str(dtype)[6:])
        for name, weight in model.weights().items():
            source = found.get(name)
            if weight.form is not None and isinstance(source, GroupedTensor):
                _read_groups(weight, source)
                continue
            if form := quantized.get(name):
                _read_quantized(name, weight, form, found)
                continue
            for first, rows in _strips(found[name], weight):
                weight.write(first, rows)
    model.compile()
    return model


def random_model(
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    seed: int,
    bits: int | None = None,
    std: float = 0.02,
) -> Decoder:
    """A model with normally distributed weights (norms are one), for measurements: the same on any number of ranks."""
    if config.weight_format:
        raise ConfigError('load_format="dummy" makes no quantized weights: take quantization_config out of config.json')
    model = empty_model(config, shard, dtype, device, max_model_len)
    model.allocate(Packing(bits))
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.weights().items():
        if isinstance(weight.target, torch.Tensor) and name.endswith("norm.weight"):
            weight.target.fill_(1)
            continue
        drawn = _random_strips(weight.shape, dtype, device, generator, std)
        if weight.order is not None:
            weight.write(0, torch.cat([values for _, values in drawn])[weight.order.to(device)])
            continue
        rows = weight.rows(0, weight.target.shape[0])
        assert isinstance(rows, slice)
        for first, values in drawn:
            begin, end = max(first, rows.start), min(first + len(values), rows.stop)
            if begin < end:
                weight.write(begin - rows.start, values[begin - first : end - first])
    model.compile()
    return model


def _random_strips(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator, std: float
) -> Iterator[tuple[int, torch.Tensor]]:
    """A random tensor, some rows at a time: the first one's index, and the rows."""
    for first, last in strips(shape[0], math.prod(shape[1:])):
        values = torch.empty(last - first, *shape[1:], dtype=dtype, device=device)
        yield first, values.normal_(0, std, generator=generator)


def empty_model(
    config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> Decoder:
    """A model without memory for its matrices. Raises ConfigError if the ranks cannot share the model out equally."""
    if device.type == "cpu" and dtype == torch.float16:
        raise ConfigError("dtype float16 is not computed on the CPU: use bfloat16 or float32")
    model = model_family(config.architecture).build(config, shard, dtype, device, max_model_len)
    return MTPDecoder(model, config, dtype, device) if config.is_mtp else model


def of_whole_model(found: Tensors) -> Tensors:
    """All tensors by the names that they have in a whole model. Those saved from its base class lack the prefix."""
    if any(name.startswith(BASE) for name in found):
        return found
    return {name if name in (HEAD, SCORE) else BASE + name: tensor for name, tensor in found.items()}


def _without_extra_layers(found: Tensors, config: ModelConfig) -> Tensors:
    """Those of the layers that are loaded. A layer that predicts later tokens comes with copies of what it shares."""
    if config.is_mtp:
        copies = (f"{config.mtp_prefix}.embed_tokens.", f"{config.mtp_prefix}.shared_head.head.")
        own = (name for name in found if name.startswith(f"{config.mtp_prefix}."))
        return {name: found[name] for name in own if not name.startswith(copies)}
    if not model_family(config.architecture).extra_layers:
        return found
    extra = re.compile(r"model\.layers\.(\d{1,6})\.")
    numbers = {name: int(match[1]) for name in found if (match := extra.match(name))}
    last = config.num_decoder_layers
    kept = (name for name in found if numbers.get(name, 0) < last and not name.startswith("mtp."))
    return {name: found[name] for name in kept}


def _quantized(weights: dict[str, Weight], found: Tensors, form: WeightFormat | None) -> dict[str, WeightFormat]:
    """The weights of a model in whose place a quantized checkpoint has other tensors: all that it may quantize, but for
    those that it has as numbers of a readable dtype."""
    if form is None:
        return {}
    plain = {name for name, tensor in found.items() if tensor.dtype in READABLE_DTYPES}
    return {name: form for name, weight in weights.items() if weight.is_quantized(form) and name not in plain}


def _stored(weights: dict[str, Weight], quantized: dict[str, WeightFormat], found: Tensors) -> dict[str, Stored]:
    """The tensors that a checkpoint must have. Raises ConfigError if ranks cannot share out groups of integers."""
    stored = {}
    for name, weight in weights.items():
        form = quantized.get(name)
        if form is None:
            stored[name] = Stored(READABLE_DTYPES, (weight.shape,))
            continue
        stored |= stored_tensors(form, _module(name), weight.shape, found)
        part, group = weight.target.shape[-1], form.group_size or weight.target.shape[-1]
        if weight.dim and part % group:
            raise ConfigError(
                f"the ranks' parts of rows have {part} weights, and the checkpoint's groups of {group} do not divide "
                "them: lower tensor_parallel_size"
            )
    return stored


def _check(stored: dict[str, Stored], found: Tensors, config: ModelConfig, file: str) -> None:
    """Raise CheckpointError unless the tensors are those of the model. file: the name of that of its config."""
    tied = config.tie_word_embeddings
    unread = UNREAD if config.weight_format else ()
    _check_names(stored, [name for name in found if not name.endswith(unread)], tied, file)
    for name, tensor in stored.items():
        _check_tensor(name, found[name], tensor, file)
    if tied and HEAD in found:
        _check_tensor(HEAD, found[HEAD], stored[EMBEDDING], file)


def _check_tied_head(embedding: Weight, found: Tensors, dtype: torch.dtype) -> None:
    """Raise CheckpointError unless the head that a file has is the embedding, which the model computes with."""
    head, own = found[HEAD], found[EMBEDDING]
    for (_, rows), (_, expected) in zip(_strips(head, embedding), _strips(own, embedding), strict=True):
        if not torch.equal(rows.to(dtype), expected.to(dtype)):
            raise CheckpointError(
                f"{head.file}: {HEAD} differs from {EMBEDDING}, but config.json says that they are one: set "
                "tie_word_embeddings to false in it"
            )


def _check_names(stored: Iterable[str], found: Iterable[str], tied: bool, config: str) -> None:
    def ignored(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (tied and name == HEAD)

    expected = set(stored)
    missing = [name for name in stored if name not in found]
    unexpected = [name for name in found if name not in expected and not ignored(name)]
    if missing or unexpected:
        parts = [f"{text} {some(names)}" for text, names in (("lacks", missing), ("has unknown", unexpected)) if names]
        raise CheckpointError(f"the checkpoint does not fit its {config}: it {' and '.join(parts)}")


def _without_zero_biases(found: Tensors, stored: Iterable[str]) -> Tensors:
    """Many checkpoints have a bias of zeros for projections that have none: AutoGPTQ writes it for all of them."""
    modules = {name.rpartition(".")[0] for name in stored}

    def is_zero_bias(name: str) -> bool:
        module, _, part = name.rpartition(".")
        return part == "bias" and name not in stored and module in modules and not found[name].read().float().any()

    return {name: tensor for name, tensor in found.items() if not is_zero_bias(name)}


def _check_tensor(name: str, found: CheckpointTensor, stored: Stored, config: str) -> None:
    if found.shape not in stored.shapes:
        raise CheckpointError(f"{found.file}: {name} has shape {found.shape}, but {config} implies {stored.shapes[0]}")
    if found.dtype not in stored.dtypes:
        raise CheckpointError(
            f"{found.file}: {name} has dtype {found.dtype}; kvllm reads {', '.join(stored.dtypes)}: use a checkpoint "
            "that has it so"
        )


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _read_quantized(name: str, weight: Weight, form: WeightFormat, found: Tensors) -> None:
    """Write this rank's part of a matrix, some rows at a time."""
    module = _module(name)
    tensors = {each: found[each].read() for each in stored_tensors(form, module, weight.shape, found)}
    columns = slice(0, weight.shape[1])
    if weight.dim:
        columns = slice(weight.start, weight.start + weight.target.shape[1])
    if isinstance(weight, ExpertMatrices):
        for expert in range(weight.shape[0]):
            weight.write_expert(expert, read_mxfp4(tensors, module, expert))
    elif weight.order is not None and form.transposed:
        every = slice(0, weight.shape[0])
        weight.write_part(0, read_integers(form, tensors, module, every, columns).rows(weight.order))
    else:
        for first, last in weight.strips():
            rows = weight.rows(first, last)
            if form.method == "float8":
                weight.write_part(first, read_float8(form, tensors, module, rows, columns))
            else:
                weight.write_part(first, read_integers(form, tensors, module, rows, columns))
    for each in tensors:
        found[each].forget()


def _hold_as_in_file(weights: dict[str, Weight], found: Tensors) -> None:
    """Give each matrix the form that holds the integers of all tensors that are parts of it, if there is one."""
    forms: dict[LinearWeight, GroupForm | None] = {}
    for name, weight in weights.items():
        if isinstance(weight.target, MatrixRows):
            matrix, form = weight.target.matrix, _form(found.get(name), weight)
            joined = forms.get(matrix, form)
            forms[matrix] = joined.joined(form) if joined and form else None
    for matrix, form in forms.items():
        matrix.form = form


def _hold_integers(weights: dict[str, Weight], quantized: dict[str, WeightFormat]) -> None:
    """Let each matrix of which all parts are integers in a quantized checkpoint hold these."""
    held: dict[LinearWeight, WeightFormat | None] = {}
    for name, weight in weights.items():
        if isinstance(weight.target, MatrixRows):
            matrix, form = weight.target.matrix, quantized.get(name)
            held[matrix] = form if form and form.integers and held.get(matrix, form) else None
    for matrix, form in held.items():
        matrix.integers = form


def _form(source: CheckpointTensor | None, weight: Weight) -> GroupForm | None:
    """That of a tensor whose columns this rank holds in whole groups."""
    form = source.form if isinstance(source, GroupedTensor) else None
    if form is None or weight.first_column % form.group or weight.target.shape[1] % form.group:
        return None
    return form


def _weights_note(weights: dict[str, Weight], found: Tensors, other: str) -> str | None:
    """What becomes of the types in which a file has its matrices, for the log: they stay, or are made others."""
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for name, weight in weights.items():
        source = found.get(name)
        if isinstance(source, GroupedTensor) and source.form is not None:
            kinds[weight.form is not None].append(source.kind.lower())
    held, changed = ("/".join(dict.fromkeys(kinds[each])) for each in (True, False))
    notes = [f"weights in {held} as in the file"] if held else []
    return "; ".join([*notes, f"weights in {changed} become {other}"] if changed else notes) or None


def _read_groups(weight: Weight, source: GroupedTensor) -> None:
    """Write this rank's part of a matrix in the file's integers, some rows at a time."""
    for first, last in weight.strips():
        weight.write_groups(first, source.read_groups(weight.rows(first, last)))
        source.forget()


def _strips(source: CheckpointTensor, weight: Weight) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows of a tensor in a file that this rank holds, some at a time: the first one's index among them, and the
    rows."""
    for first, last in weight.strips():
        yield first, source.read(weight.rows(first, last))
        source.forget()
