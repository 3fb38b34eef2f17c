"""The cost of a step beside the model: Ray's executor with one rank against the executor in this process.

    python -m benchmarks.executor_overhead

The same requests run on both executors, with the same model. The overhead of a step is the time of `execute` less the
time that the worker reports for the plan. The figures are medians over the steps that only decode, and the size of the
plans.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from statistics import mean, median

import torch

from benchmarks.common import command_line
from benchmarks.common.internals import engine_of, replace_executor
from kvllm import LLM, SamplingParams
from kvllm.core.executor import Executor
from kvllm.core.protocol import StepPlan, StepResult, encode

BLOCK_SIZE = 16
PROMPT_TOKENS = 32


class Measuring(Executor):
    """Passes plans on, and records the cost of each step that only decodes."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.step_us: list[float] = []
        self.overhead_us: list[float] = []
        self.plan_bytes: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        result = self.executor.execute(plan)
        seconds = time.perf_counter() - begin
        if not plan.new_seqs:
            self.step_us.append(seconds * 1e6)
            self.overhead_us.append((seconds - result.seconds.model) * 1e6)
            self.plan_bytes.append(len(encode(plan)))
        return result

    def close(self) -> None:
        self.executor.close()


def measure(llm: LLM, batch: int, output_tokens: int) -> Measuring:
    """Decode `batch` random prompts together."""
    rng = random.Random(0)
    vocab = llm.model_config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    executor = engine_of(llm).executor
    measuring = Measuring(executor)
    replace_executor(llm, measuring)
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    replace_executor(llm, executor)
    return measuring


def run_overhead(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.executor_overhead", __doc__)
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[1, 8, 64], help="sequences that decode together (default 1 8 64)")
    add("--output-tokens", type=int, default=512, help="steps of a batch (default 512)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    blocks = max(args.batches) * -(-(PROMPT_TOKENS + args.output_tokens) // BLOCK_SIZE)
    print("executor  batch  step, us  overhead, us  plan, bytes: first and second half, per sequence", flush=True)
    for backend in ("inline", "ray"):
        llm = LLM(distributed_executor_backend=backend, block_size=BLOCK_SIZE, num_gpu_blocks_override=blocks + 1)
        for batch in args.batches:
            print(show(backend, batch, measure(llm, batch, args.output_tokens)), flush=True)
        llm.llm_engine.close()


def show(backend: str, batch: int, found: Measuring) -> str:
    middle = len(found.plan_bytes) // 2
    first, second = (mean(half) for half in (found.plan_bytes[:middle], found.plan_bytes[middle:]))
    return (
        f"{backend:8} {batch:6} {median(found.step_us):9.0f} {median(found.overhead_us):13.0f}"
        f" {first:13.1f} {second:8.1f} {second / batch:8.2f}"
    )


def main() -> None:
    command_line.run_script(run_overhead)


if __name__ == "__main__":
    main()
