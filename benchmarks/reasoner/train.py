"""Train the reasoner and write it as a Hugging Face checkpoint: `python -m benchmarks.reasoner.train --out DIR`."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from benchmarks.reasoner.problems import DEFAULT_LINES, SYMBOLS, Problem, grade, make_problem

PAD, EOS = "<pad>", "<eos>"
TOKEN_IDS = {token: i for i, token in enumerate([PAD, EOS, *SYMBOLS])}

NUM_LAYERS, HIDDEN, INTERMEDIATE = 4, 192, 512
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 64
ROPE_THETA, RMS_EPS = 10_000.0, 1e-6

BATCH_TOKENS = 4096
MUON_LR, ADAMW_LR, WARMUP_STEPS = 0.02, 3e-3, 40
FIRST_LINES, GROWTH, GROW_ACCURACY, GROW_WINDOW = 14, 1.25, 0.97, 12


class RMSNorm(nn.Module):
    def __init__(self, size: int, weight: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), weight))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + RMS_EPS) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, NUM_HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, NUM_KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, NUM_KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(NUM_HEADS * HEAD_DIM, HIDDEN, bias=False)
        # Weights above 1 sharpen attention from the start: nearly every token of a working is a look-up.
        self.q_norm = RMSNorm(HEAD_DIM, 1.5)
        self.k_norm = RMSNorm(HEAD_DIM, 1.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, NUM_HEADS, HEAD_DIM)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, NUM_KV_HEADS, HEAD_DIM)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, NUM_KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        group = NUM_HEADS // NUM_KV_HEADS
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, NUM_HEADS * HEAD_DIM))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(HIDDEN)
        self.self_attn = Attention()
        self.post_attention_layernorm = RMSNorm(HIDDEN)
        self.mlp = MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Reasoner(nn.Module):
    """Qwen3 for training; its parameters are named as in Hugging Face's Qwen3Model, and the embedding is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(len(TOKEN_IDS), HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm = RMSNorm(HIDDEN)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for name, parameter in self.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] for token ids [batch, length]."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def rope_tables(length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, HEAD_DIM / 2] of the rotary angles of positions 0 to length - 1."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def encode(text: str) -> list[int]:
    return [TOKEN_IDS[symbol] for symbol in text]


def make_batch(rng: random.Random, lines: int) -> tuple[Tensor, int]:
    """About BATCH_TOKENS tokens of solved problems [batch, length], and the position at which the workings start."""
    problem = make_problem(rng, lines)
    count = max(1, round(BATCH_TOKENS / (len(problem.prompt + problem.working) + 1)))
    problems = [problem, *(make_problem(rng, lines) for _ in range(count - 1))]
    rows = [[*encode(p.prompt + p.working), TOKEN_IDS[EOS]] for p in problems]
    return torch.tensor(rows), len(problem.prompt)


@dataclass
class Curriculum:
    """Half of the batches have `longest` lines, which grows as soon as those are predicted well; the rest fewer."""

    target: int
    longest: int
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=GROW_WINDOW))

    def draw(self, rng: random.Random) -> int:
        return self.longest if rng.random() < 0.5 else rng.randint(2, self.longest)

    def update(self, lines: int, accuracy: float) -> None:
        if lines == self.longest:
            self.recent.append(accuracy)
        learned = len(self.recent) == GROW_WINDOW and sum(self.recent) / GROW_WINDOW > GROW_ACCURACY
        if learned and self.longest < self.target:
            self.longest = min(self.target, math.ceil(self.longest * GROWTH))
            self.recent.clear()


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


def save_progress(path: Path, model: Reasoner, optimizers: list[torch.optim.Optimizer], numbers: dict) -> None:
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for o, optimizer in enumerate(optimizers):
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            tensors |= {f"optimizer.{o}.{i}.{key}": value for key, value in optimizer.state[p].items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"numbers": json.dumps(numbers)})
    partial.replace(path)


def load_progress(path: Path, model: Reasoner, optimizers: list[torch.optim.Optimizer]) -> dict:
    parameters = dict(model.named_parameters())
    with safe_open(path, "pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            kind, _, rest = key.partition(".")
            if kind == "model":
                parameters[rest].copy_(file.get_tensor(key))
            else:
                o, i, name = rest.split(".")
                optimizer = optimizers[int(o)]
                optimizer.state[optimizer.param_groups[0]["params"][int(i)]][name] = file.get_tensor(key)
        return json.loads(file.metadata()["numbers"])


def train(model: Reasoner, args: argparse.Namespace) -> dict:
    """Train within the token or time budget; returns steps, tokens, seconds, longest program and mean recent loss."""
    optimizers = make_optimizers(model)
    numbers = {"step": 0, "tokens": 0, "seconds": 0.0, "longest": min(FIRST_LINES, args.lines), "loss": 0.0}
    if args.resume and args.resume.exists():
        numbers = load_progress(args.resume, model, optimizers)
    curriculum = Curriculum(args.lines, numbers["longest"])
    compiled = torch.compile(model, dynamic=True)
    cos, sin = rope_tables(4096)
    losses: deque[float] = deque(maxlen=50)
    started = time.monotonic() - numbers["seconds"]

    while True:
        numbers["seconds"] = time.monotonic() - started
        progress = numbers["seconds"] / (60 * args.minutes) if args.minutes else numbers["tokens"] / args.tokens
        if progress >= 1:
            return numbers
        factor = learning_rate_factor(numbers["step"], progress)
        for optimizer, peak in zip(optimizers, (MUON_LR, ADAMW_LR), strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor

        # Seeding every step by its number makes a resumed run draw what the uninterrupted one would have drawn.
        rng = random.Random(f"{args.seed}/{numbers['step']}")
        lines = curriculum.draw(rng)
        ids, start = make_batch(rng, lines)
        length = ids.shape[1] - 1
        with torch.autocast("cpu", torch.bfloat16):
            logits = compiled(ids[:, :-1], cos[:length], sin[:length])
        logits, targets = logits[:, start - 1 :].float().flatten(0, 1), ids[:, start:].flatten()
        loss = F.cross_entropy(logits, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

        curriculum.update(lines, (logits.argmax(-1) == targets).float().mean().item())
        losses.append(loss.item())
        numbers |= {"step": numbers["step"] + 1, "tokens": numbers["tokens"] + ids.numel()}
        numbers |= {"longest": curriculum.longest, "loss": sum(losses) / len(losses)}
        if numbers["step"] % 25 == 0:
            accuracy = sum(curriculum.recent) / max(len(curriculum.recent), 1)
            print(json.dumps(numbers | {"accuracy at longest": round(accuracy, 4)}), flush=True)
        if args.resume and numbers["step"] % 200 == 0:
            save_progress(args.resume, model, optimizers, numbers)


def build_tokenizer() -> Tokenizer:
    """One token per character; text outside the alphabet is an error rather than an unknown token."""
    tokenizer = Tokenizer(models.WordLevel(TOKEN_IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS])
    return tokenizer


def save_checkpoint(model: Reasoner, out: Path) -> None:
    """Write config, float32 weights and tokenizer as transformers' Qwen3ForCausalLM and AutoTokenizer read them."""
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(TOKEN_IDS),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": RMS_EPS,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": TOKEN_IDS[EOS],
        "pad_token_id": TOKEN_IDS[PAD],
        "torch_dtype": "float32",
    }
    generation = {"do_sample": False, "eos_token_id": TOKEN_IDS[EOS], "pad_token_id": TOKEN_IDS[PAD]}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    for name, content in [("config", config), ("generation_config", generation), ("tokenizer_config", tokenizer)]:
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    build_tokenizer().save(str(out / "tokenizer.json"))
    weights = {f"model.{name}": p.detach().float().contiguous() for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def held_out(seed: int, count: int, lines: int) -> list[Problem]:
    rng = random.Random(f"{seed}/held out")
    return [make_problem(rng, lines) for _ in range(count)]


@torch.inference_mode()
def evaluate(checkpoint: Path, problems: list[Problem]) -> dict[str, float]:
    """Solve problems of equally many lines greedily with transformers in float32; fractions solved, and the loss."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    grades, losses = [], []
    for i in range(0, len(problems), 25):
        batch = problems[i : i + 25]
        prompts = tokenizer([p.prompt for p in batch], return_tensors="pt")
        start = prompts.input_ids.shape[1]
        output = model.generate(**prompts, max_new_tokens=len(batch[0].working) + 16, do_sample=False)
        texts = tokenizer.batch_decode(output[:, start:], skip_special_tokens=True)
        grades += [grade(problem, text) for problem, text in zip(batch, texts, strict=True)]
        solved = tokenizer([p.prompt + p.working + EOS for p in batch], return_tensors="pt").input_ids
        logits = model(solved[:, :-1]).logits[:, start - 1 :]
        losses.append(F.cross_entropy(logits.flatten(0, 1), solved[:, start:].flatten()).item())
    answers, workings = zip(*grades, strict=True)
    return {
        "held-out loss": sum(losses) / len(losses),
        "right answers": sum(answers) / len(answers),
        "exact workings": sum(workings) / len(workings),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=DEFAULT_LINES, help="lines of the longest programs")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, help="train for this long, instead of for a number of tokens")
    budget.add_argument("--tokens", type=int, default=6_000_000, help="train on this many tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--resume", type=Path, help="file that keeps the progress; continue from it if it exists")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = Reasoner()
    numbers = train(model, args)
    save_checkpoint(model, args.out)
    result = evaluate(args.out, held_out(args.seed, 200, args.lines))
    print(json.dumps({"seed": args.seed, "lines": args.lines} | numbers | result, indent=2))


if __name__ == "__main__":
    main()
