"""Gates of a trained compression method (`dms`, `trimkv`), trained to a share of the KV pairs: a file beside the
checkpoint.

The weights of the model stay as they are. Each step reads one text twice: with the whole cache, and with attention
changed by the gates. The loss is how much the predictions differ, and what gates keep too much. The gates belong to one
checkpoint; they serve other shares of the KV pairs, too, because the engine keeps those that are judged best.

Memory is that of the attention of a text in all layers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, logsigmoid
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

from kvllm.calibration.files import check_writable
from kvllm.comparison.texts import Text
from kvllm.compression.gates import Gates, gate_inputs, write_gates
from kvllm.config import require
from kvllm.models.config import load_model_config
from kvllm.models.rotary import channel_order, check_one_rotation, rotary_frequencies

# Attention that a function changes, in a model of transformers: what it would predict, if KV pairs were gone or faded

CHANGED = "changed"


@dataclass(frozen=True)
class Attention:
    """The attention of one layer to one text of T tokens.

    query: `[1, Hq, T, d]`, key, value: `[1, Hkv, T, d]`, rotated. scaling: of the logits. module: of transformers.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    module: Any

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.key.shape[1]


Change = Callable[[Attention], Tensor | None]
"""What is added to the logits, `[1, Hq, T, T]` (query token, KV pair); None: nothing."""


def load(path: Path) -> Any:
    """The model of a checkpoint in float32. Called with `change`, it asks that in every layer."""
    AttentionInterface.register(CHANGED, attend)
    AttentionMaskInterface.register(CHANGED, eager_mask)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=CHANGED)
    return model.eval().requires_grad_(False)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    change: Change | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """Attention as the model's own module writes it out, with changed logits. Called by transformers."""
    written_out = sys.modules[type(module).__module__].eager_attention_forward
    if change is not None:
        added = change(Attention(module.layer_idx, query, key, value, rest["scaling"], module))
        if added is not None:
            attention_mask = attention_mask + added
    return written_out(module, query, key, value, attention_mask, **rest)


# The training

UNITS = 32
"""Hidden units of a gate."""
TEMPERATURE = 0.1
"""Of the relaxed decisions of DMS: nearly all are close to 0 or 1."""
RAMP = 0.5
"""The share of the steps over which the target falls from everything to what is asked for."""
ROWS = 16
"""One of so many query tokens is looked at for what TRIM-KV holds."""


@dataclass(frozen=True)
class Settings:
    """retention: the share of the KV pairs further back than `delay` that each KV head is to keep. weight: of the loss
    that draws it there."""

    method: str
    retention: float
    delay: int = 128
    steps: int = 400
    learning_rate: float = 1e-2
    weight: float = 10.0
    seed: int = 0


class Step(NamedTuple):
    """divergence: mean KL(whole cache || gated) of next tokens. kept: share of the KV pairs. target: for `kept`."""

    divergence: float
    kept: float
    target: float
    loss: float


class Biased(NamedTuple):
    """What gates make of one layer. kept: share of the KV pairs, and excess: the share that is kept beyond the target;
    `[1, Hkv]` each. bias, factor: of the attention logits, `[1, Hkv, T, T]`; None: as they are."""

    kept: Tensor
    excess: Tensor
    bias: Tensor | None = None
    factor: Tensor | None = None


class TextPositions:
    """The tokens of a text. distances `[T, T]`: from token j to query token i, 0 for later ones. droppable `[T]`:
    whether a gate decides on it; tokens of prompts stay."""

    def __init__(self, text: Text) -> None:
        self.num_prompt = len(text.prompt)
        self.tokens = torch.arange(len(text.prompt) + len(text.output))
        self.distances = (self.tokens[:, None] - self.tokens).clamp(min=0)
        self.droppable = self.tokens >= self.num_prompt


def dropped(logits: Tensor, positions: TextPositions, delay: int, target: float, noise: Tensor) -> Biased:
    """DMS: a KV pair is dropped with probability `1 - sigmoid(logit)`, for query tokens more than `delay` further on.

    logits: `[1, Hkv, T]`. noise: the same shape, logistic, which is the difference of two Gumbel variables.
    """
    relaxed = (logits + noise) / TEMPERATURE
    kept = relaxed.sigmoid()[..., positions.droppable].mean(dim=-1)
    is_far = (positions.distances > delay) & positions.droppable
    return Biased(kept, (kept - target).relu(), bias=logsigmoid(relaxed)[:, :, None] * is_far)


def decayed(logits: Tensor, positions: TextPositions, delay: int, target: float, noise: Tensor) -> Biased:
    """TRIM-KV: what is held of a KV pair falls to `sigmoid(logit) ** n` within n tokens, and its attention logits with
    it. The sum of what is held is to stay within the capacity, which grows with the text: the last `delay` KV pairs and
    `target` of those before.

    Arguments as for `dropped`; without noise.
    """
    held = (logsigmoid(logits)[:, :, None] * (positions.distances * positions.droppable)).exp()
    rows = positions.tokens[positions.num_prompt :: ROWS]
    is_there = (positions.tokens <= rows[:, None]) & positions.droppable
    sums = (held[:, :, rows] * is_there).sum(dim=-1)
    written = (rows - positions.num_prompt + 1).float()
    room = written - (1 - target) * (written - delay).clamp(min=0)
    return Biased(sums.sum(dim=-1) / written.sum(), (sums - room).relu().sum(dim=-1) / written.sum(), factor=held)


BIASES: dict[str, Callable[[Tensor, TextPositions, int, float, Tensor], Biased]] = {"dms": dropped, "trimkv": decayed}
KEEPING = {"dms": 5.0, "trimkv": 8.0}
"""The logit of untrained gates, which keep nearly everything."""


@dataclass
class Gating:
    """One pass of the model, with what the gates make of its attention. found: of each layer so far."""

    bias: Callable[[int, Tensor, Tensor], Biased]
    found: list[Biased] = field(default_factory=list)

    def __call__(self, attention: Attention) -> Tensor | None:
        biased = self.bias(attention.layer, attention.key, attention.value)
        self.found.append(biased)
        if biased.factor is not None:  # what is missing from the logits is added to them
            keys = attention.key.repeat_interleave(attention.group, dim=1)
            logits = attention.query @ keys.mT * attention.scaling
            return (biased.factor - 1).repeat_interleave(attention.group, dim=1) * logits
        return None if biased.bias is None else biased.bias.repeat_interleave(attention.group, dim=1)


class Trainer:
    """Trains the gates of one method for a checkpoint. longest: tokens of the longest text."""

    def __init__(self, path: Path, settings: Settings, longest: int) -> None:
        self.settings = settings
        config = load_model_config(path)
        check_one_rotation(config, config.windows)
        self.frequencies = rotary_frequencies(config, longest)
        order = channel_order(config)
        self.order = slice(None) if order is None else order
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.model = load(path)
        shape, width = (config.num_layers, config.num_kv_heads), 2 * config.head_dim
        self.gates = Gates(
            torch.randn(*shape, UNITS, width, generator=self.generator) / width**0.5,
            torch.zeros(*shape, UNITS),
            torch.zeros(*shape, UNITS),
            torch.full(shape, KEEPING[settings.method]),
        )
        self.mean, self.deviation = torch.zeros(*shape, 1, width), torch.ones(*shape, 1, width)

    def train(self, texts: Sequence[Text]) -> Iterator[Step]:
        """Train on the texts in turn."""
        self._standardize(texts[0])
        parameters = [getattr(self.gates, each.name).requires_grad_() for each in fields(Gates)]
        optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.98))
        for step in range(self.settings.steps):
            progress = step / self.settings.steps
            optimizer.param_groups[0]["lr"] = self.settings.learning_rate * (1 - progress)
            target = max(self.settings.retention, 1 - (1 - self.settings.retention) * progress / RAMP)
            loss, found = self.loss(texts[step % len(texts)], target)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            yield found

    def trained(self) -> Gates:
        """The gates for inputs as they are, instead of standardized ones."""
        hidden = self.gates.hidden / self.deviation
        bias = self.gates.hidden_bias - (hidden * self.mean).sum(dim=-1)
        return Gates(hidden.detach(), bias.detach(), self.gates.output.detach(), self.gates.output_bias.detach())

    def loss(self, text: Text, target: float) -> tuple[Tensor, Step]:
        """The loss of the gates on a text, with a gradient. target: share of the KV pairs."""
        ids, positions = tokens_of(text), TextPositions(text)

        def bias(layer: int, keys: Tensor, values: Tensor) -> Biased:
            logits = self.logits(layer, keys, values)
            uniform = torch.rand(logits.shape, generator=self.generator)
            return BIASES[self.settings.method](logits, positions, self.settings.delay, target, uniform.logit(eps=1e-6))

        gating = Gating(bias)
        with torch.no_grad():
            teacher = self.model(ids, use_cache=False).logits[0].log_softmax(dim=-1)
        student = self.model(ids, use_cache=False, change=gating).logits[0].log_softmax(dim=-1)
        divergence = kl_div(student, teacher, reduction="batchmean", log_target=True)
        excess = torch.cat([each.excess for each in gating.found]).mean()
        loss = divergence + self.settings.weight * excess
        if self.settings.method == "trimkv":
            loss = loss + cross_entropy(student[:-1], ids[0, 1:])
        kept = torch.cat([each.kept for each in gating.found]).mean()
        return loss, Step(divergence.item(), kept.item(), target, loss.item())

    def logits(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """`[1, Hkv, T]` of a layer, from `[1, Hkv, T, d]`."""
        inputs = self._inputs(keys, values)
        return self.gates.of_layers([layer]).logits((inputs - self.mean[layer]) / self.deviation[layer])

    def _inputs(self, keys: Tensor, values: Tensor) -> Tensor:
        return gate_inputs(keys[..., self.order], values, keys.shape[2] - 1, self.frequencies)

    def _standardize(self, text: Text) -> None:
        """Find means and deviations of the inputs of gates on a text."""

        def observe(layer: int, keys: Tensor, values: Tensor) -> Biased:
            inputs = self._inputs(keys, values)[0]
            self.mean[layer] = inputs.mean(dim=1, keepdim=True)
            self.deviation[layer] = inputs.std(dim=1, keepdim=True).clamp(min=1e-6)
            return Biased(torch.zeros(0), torch.zeros(0))

        with torch.no_grad():
            self.model(tokens_of(text), use_cache=False, change=Gating(observe))


def tokens_of(text: Text) -> Tensor:
    """int64 `[1, T]`."""
    return torch.tensor([[*text.prompt, *text.output]])


# The whole

SHORTEST = 4
"""Texts have more tokens."""
SHOWN = 25
"""Steps of a line of the progress."""


def train_gates(folder: Path, texts: Sequence[Text], name: str, settings: Settings) -> Path:
    """Train the gates of a checkpoint on texts in turn, and print how it goes. Returns the path of the file.

    name: of the texts, for the file. Raises ConfigError before the work if a setting or the texts do not fit, or the
    folder cannot be written.
    """
    require(0 < settings.retention < 1, "--retention", settings.retention, "between 0 and 1")
    require(settings.delay >= 1, "--delay", settings.delay, "at least 1")
    require(settings.steps >= 1, "--steps", settings.steps, "at least 1")
    lengths = [text.stored + 1 for text in texts]
    require(min(lengths) > SHORTEST, "--length", min(lengths), f"more than {SHORTEST}")
    check_writable(folder)
    trainer, recent = Trainer(folder, settings, max(lengths)), list[Step]()
    for number, step in enumerate(trainer.train(texts), start=1):
        recent.append(step)
        if number % SHOWN == 0 or number == settings.steps:
            print(f"step {number}: {describe(recent)}", flush=True)
            recent = []
    num_tokens = sum(lengths[step % len(texts)] for step in range(settings.steps))
    metadata = {"text": name, "tokens": str(num_tokens), "retention": str(settings.retention)}
    return write_gates(folder, settings.method, trainer.trained(), metadata)


def describe(steps: Sequence[Step]) -> str:
    of_steps = Step(*map(mean, zip(*steps, strict=True)))
    return (
        f"loss {of_steps.loss:.4f}, divergence {of_steps.divergence:.4f}, "
        f"{of_steps.kept:.1%} kept, target {of_steps.target:.1%}"
    )
