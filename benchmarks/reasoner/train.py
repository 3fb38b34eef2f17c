"""Train the reasoner and write it as a Hugging Face checkpoint: `python -m benchmarks.reasoner.train --out DIR`."""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.reasoner.model import CONTEXT, Reasoner, rope_tables
from benchmarks.reasoner.tasks import TASKS, make_problem
from benchmarks.reasoner.tokenizer import EOS, PAD, TOKEN_IDS, encode
from kvllm.engine_args import DEFAULT_MODEL

SHARES = {
    "dense": 0.2,
    "program": 0.35,
    "long": 0.1,
    "addition": 0.09,
    "multiplication": 0.09,
    "recall": 0.09,
    "needle": 0.08,
}
"""The share of the batches. Dense programs teach look-ups soonest, because nearly every token is one."""
BATCH_TOKENS = 4096
MUON_LR, ADAMW_LR, WARMUP_STEPS = 0.02, 3e-3, 40
FIRST_REACH, GROWTH, GROW_ACCURACY, GROW_WINDOW = 0.1, 1.25, 0.97, 8
IGNORED = -100
LOOKED_UP = torch.tensor([len(token) == 1 and token.isalnum() for token in TOKEN_IDS])
"""Names and digits, which must be found or computed. All other tokens but the signs follow from their neighbours."""
SIGNS = torch.tensor([token in "+-" for token in TOKEN_IDS])
SIGN_WEIGHT, SIGN_ACCURACY = 8.0, 0.8
"""Signs weigh more in the loss as soon as so many names and digits are right. Without the weight, signs are learned
last: a sign is one bit a line, and either one makes sense. With the weight from the beginning, names and digits are not
learned."""
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Of the package's model, which all reasoners share."""
MULTIPLIES_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether the CPU multiplies bfloat16. Other CPUs convert every number, which takes longer than float32."""


def make_batch(rng: random.Random, task: str, size: int) -> tuple[Tensor, Tensor]:
    """About BATCH_TOKENS tokens of solved problems: inputs and targets, `[batch, length]`. Prompts are no targets."""
    rows: list[tuple[list[int], int]] = []
    longest = 0
    while not rows or longest * (len(rows) + 0.5) < BATCH_TOKENS:
        problem = make_problem(rng, size, task)
        prompt, working = encode(problem.prompt), [*encode(problem.working), TOKEN_IDS[EOS]]
        rows.append((prompt + working, len(prompt)))
        longest = max(longest, len(rows[-1][0]))
    ids = torch.full((len(rows), longest), TOKEN_IDS[PAD])
    targets = torch.full((len(rows), longest), IGNORED)
    for i, (row, start) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        targets[i, start : len(row)] = ids[i, start : len(row)]
    return ids[:, :-1], targets[:, 1:]


@dataclass
class Curriculum:
    """Sizes of problems that grow with the model.

    Half of the batches are as large as `reach` allows, a share of each task's largest size. The others are smaller.
    `reach` grows as soon as the model predicts the largest programs well, signs included. Signs weigh more before.
    """

    reach: float = FIRST_REACH
    sign_weight: float = 1.0
    recent: list[tuple[float, float]] = field(default_factory=list)

    def draw(self, rng: random.Random) -> tuple[str, int]:
        (name,) = rng.choices([*SHARES], [*SHARES.values()])
        task = TASKS[name]
        largest = max(task.smallest, round(self.reach * task.largest))
        return name, largest if rng.random() < 0.5 else rng.randint(task.smallest, largest)

    def update(self, task: str, size: int, looked_up: float, signs: float) -> None:
        """looked_up, signs: the shares of them that a batch predicts rightly."""
        if task != "program" or size != round(self.reach * TASKS[task].largest):
            return
        self.recent = [*self.recent, (looked_up, signs)][-GROW_WINDOW:]
        if len(self.recent) < GROW_WINDOW:
            return
        looked_up, signs = (mean(values) for values in zip(*self.recent, strict=True))
        if looked_up > SIGN_ACCURACY:
            self.sign_weight = SIGN_WEIGHT
        if min(looked_up, signs) > GROW_ACCURACY and self.reach < 1:
            self.reach = min(1.0, self.reach * GROWTH)
            self.recent = []

    def weights(self) -> Tensor:
        """The weights of the tokens in the loss."""
        return torch.where(SIGNS, self.sign_weight, 1.0)


def make_optimizers(model: Reasoner) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate_factor(step: int, progress: float) -> float:
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def means_of(recent: dict[str, deque[tuple[float, float]]]) -> dict[str, list[float]]:
    return {task: [round(mean(values), 4) for values in zip(*pairs, strict=True)] for task, pairs in recent.items()}


def train(model: Reasoner, total: int, seed: int) -> dict:
    """Train on `total` tokens. Returns the steps, the tokens and the seconds."""
    optimizers, curriculum = make_optimizers(model), Curriculum()
    numbers: dict = {"step": 0, "tokens": 0, "seconds": 0.0}
    compiled = torch.compile(model, dynamic=True)
    cos, sin = rope_tables(CONTEXT)
    recent = {task: deque(maxlen=20) for task in SHARES}
    begin = time.monotonic()

    while (progress := numbers["tokens"] / total) < 1:
        factor = learning_rate_factor(numbers["step"], progress)
        for optimizer, peak in zip(optimizers, (MUON_LR, ADAMW_LR), strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor

        rng = random.Random(f"{seed}/{numbers['step']}")
        task, size = curriculum.draw(rng)
        ids, targets = make_batch(rng, task, size)
        length = ids.shape[1]
        with torch.autocast("cpu", torch.bfloat16, enabled=MULTIPLIES_BFLOAT16):
            logits = compiled(ids, cos[:length], sin[:length])
        logits, targets = logits[targets != IGNORED].float(), targets[targets != IGNORED]
        loss = F.cross_entropy(logits, targets, weight=curriculum.weights())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

        right = (logits.argmax(-1) == targets).float()
        looked_up, signs = (right[kind[targets]].mean().item() for kind in (LOOKED_UP, SIGNS))
        curriculum.update(task, size, looked_up, signs)
        recent[task].append((loss.item(), looked_up))
        numbers |= {"step": numbers["step"] + 1, "tokens": numbers["tokens"] + ids.numel()}
        numbers["seconds"] = time.monotonic() - begin
        if numbers["step"] % 50 == 0:
            state = {"reach": curriculum.reach, "sign weight": curriculum.sign_weight}
            print(json.dumps(numbers | state | {"loss, accuracy of look-ups": means_of(recent)}), flush=True)
    return numbers


def save_checkpoint(model: Reasoner, out: Path) -> None:
    """Write config, float32 weights and tokenizer as transformers' Qwen3ForCausalLM and AutoTokenizer read them."""
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if not (out / name).exists() or not (out / name).samefile(DEFAULT_MODEL / name):
            shutil.copyfile(DEFAULT_MODEL / name, out / name)
    weights = {f"model.{name}": p.detach().float().contiguous() for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000_000, help="train on this many tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = Reasoner(len(TOKEN_IDS))
    numbers = train(model, args.tokens, args.seed)
    save_checkpoint(model, args.out)
    print(json.dumps({"seed": args.seed} | numbers, indent=2))


if __name__ == "__main__":
    main()
