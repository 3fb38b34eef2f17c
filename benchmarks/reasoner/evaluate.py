"""The reasoner's right answers by task and size, with transformers and with the engine.

    python -m benchmarks.reasoner.evaluate

Both answer greedily, in float32, with the full cache, and must give the same texts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import command_line, report
from benchmarks.reasoner.problems import Problem, grade
from benchmarks.reasoner.tasks import TASKS, make_problem
from benchmarks.reasoner.tokenizer import EOS, TOKEN_IDS, encode
from kvllm import LLM, SamplingParams
from kvllm.engine_args import DEFAULT_MODEL


def held_out(task: str, size: int, count: int) -> list[Problem]:
    """Problems that training never draws."""
    rng = random.Random(f"held out/{task}/{size}")
    return [make_problem(rng, size, task) for _ in range(count)]


def sizes(task: str) -> list[int]:
    """A short, a middling and the longest problem."""
    smallest, largest = TASKS[task].smallest, TASKS[task].largest
    return [smallest + round(part * (largest - smallest)) for part in (0.1, 0.5, 1.0)]


class Transformers:
    """Answers of `transformers`."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.inference_mode()
    def answer(self, problems: list[Problem]) -> list[str]:
        prompts = self.tokenizer([problem.prompt for problem in problems], return_tensors="pt", padding=True)
        output = self.model.generate(**prompts, max_new_tokens=most_tokens(problems), do_sample=False)
        return self.tokenizer.batch_decode(output[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)

    @torch.inference_mode()
    def loss(self, problems: list[Problem]) -> float:
        """Cross entropy of a token of the workings, in nats."""
        total, tokens = 0.0, 0
        for problem in problems:
            prompt, working = encode(problem.prompt), [*encode(problem.working), TOKEN_IDS[EOS]]
            logits = self.model(torch.tensor([prompt + working])).logits[0, len(prompt) - 1 : -1]
            total += F.cross_entropy(logits, torch.tensor(working), reduction="sum").item()
            tokens += len(working)
        return total / tokens


def most_tokens(problems: list[Problem]) -> int:
    return max(len(encode(p.working)) for p in problems) + 16


def answer_with_engine(checkpoint: Path, problems: list[Problem]) -> list[str]:
    longest = max(len(encode(p.prompt)) for p in problems) + most_tokens(problems)
    blocks = len(problems) * (longest // 16 + 1)
    llm = LLM(checkpoint, dtype="float32", block_size=16, num_gpu_blocks_override=max(blocks, 257))
    params = SamplingParams(temperature=0, max_tokens=most_tokens(problems))
    return [output.outputs[0].text for output in llm.generate([p.prompt for p in problems], params, use_tqdm=False)]


def evaluate(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.reasoner.evaluate", __doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=DEFAULT_MODEL, help="default: the package's")
    parser.add_argument("--problems", type=int, default=50, help="problems of each task and size (default 50)")
    args = parser.parse_args(arguments)
    reference = Transformers(args.checkpoint)
    rows = []
    for task in TASKS:
        for size in sizes(task):
            problems = held_out(task, size, args.problems)
            texts, of_engine = reference.answer(problems), answer_with_engine(args.checkpoint, problems)
            right, exact = (sum(column) for column in zip(*map(grade, problems, texts), strict=True))
            engine_right = sum(grade(problem, text)[0] for problem, text in zip(problems, of_engine, strict=True))
            tokens = sum(len(encode(problem.working)) for problem in problems) / len(problems)
            same = sum(a == b for a, b in zip(texts, of_engine, strict=True))
            counts = [f"{n} of {len(problems)}" for n in (right, exact, engine_right, same)]
            loss = f"{reference.loss(problems):.1e}"
            rows.append([task, f"{size} {TASKS[task].unit}", f"{tokens:.0f}", loss, *counts])
    header = ["task", "size", "tokens of\nworking", "held-out\nloss", "right\nanswers", "exact\nworkings"]
    print(report.table([*header, "right by\nthe engine", "same\ntexts"], rows))


if __name__ == "__main__":
    command_line.run_script(evaluate)
