"""The cost of a step beside the model, in two tables.

    python -m benchmarks.executor_overhead

1. Ray's executor with one rank against the executor in this process. The same requests run on both, with the same
   model. The overhead of a step is the time of `execute` less the time that the worker reports for the plan. All are
   medians over the steps that only decode, and the size of the plans.
2. The host's critical path, with `async_scheduling` off and on. In place of the model's pass stands a device that is
   busy for a while and takes no processor. It is idle from the end of a pass, when the logits are there, to the
   beginning of the next. When the engine waits, all that the host does is in between: tokens are chosen and go to the
   engine, every token's text is made at once, the next plan comes back, and its inputs are prepared. When it plans
   ahead, tokens are chosen, go into inputs that are prepared already, and the result is handed over; the rest counts
   only as far as it holds that up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import torch

from benchmarks.common import command_line
from benchmarks.common.internals import engine_of, replace_executor, runner_of
from kvllm import LLM, SamplingParams
from kvllm.core.executor import BlockingExecutor, Executor
from kvllm.core.protocol import StepPlan, StepResult, encode
from kvllm.worker.model_runner import ModelRunner

BLOCK_SIZE = 16
PROMPT_TOKENS = 32
SAMPLED_FROM = 8
"""Logits of a row that the stand-in for a device gives: to sample is a device's work, too."""


class Measuring(BlockingExecutor):
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


class StandIn:
    """A device in place of a model: a pass takes `seconds`, in which the processor is free.

    idle_us: from the end of each pass to the beginning of the next.
    """

    def __init__(self, runner: ModelRunner, seconds: float) -> None:
        self.seconds = seconds
        self.idle_us: list[float] = []
        self._ended: float | None = None
        runner.model.forward = self._forward
        runner.model.logits = self._logits

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Any, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._ended is not None:
            self.idle_us.append((time.perf_counter() - self._ended) * 1e6)
        time.sleep(self.seconds)
        return torch.zeros(len(token_ids if wanted is None else wanted), 1)

    def _logits(self, hidden: torch.Tensor, *, rounded: bool = False) -> torch.Tensor:
        logits = torch.zeros(len(hidden), SAMPLED_FROM)
        self._ended = time.perf_counter()
        return logits


def measure_idle(llm: LLM, batch: int, output_tokens: int, seconds: float) -> float:
    """Microseconds for which a device waits for the host, the median over the steps that decode a whole batch."""
    engine, device = engine_of(llm), StandIn(runner_of(llm), seconds)
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    for index in range(batch):
        prompt = {"prompt_token_ids": [index % SAMPLED_FROM] * PROMPT_TOKENS}
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
    return median(device.idle_us[-output_tokens // 2 : -2])


def run_overhead(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.executor_overhead", __doc__)
    add = parser.add_argument
    add(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 8, 64, 256],
        help="sequences that decode together (default 1 8 64 256)",
    )
    add("--output-tokens", type=int, default=512, help="steps of a batch (default 512)")
    add("--device-ms", type=float, default=10, help="a pass of the device of the second table, in ms (default 10)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    blocks = max(args.batches) * -(-(PROMPT_TOKENS + args.output_tokens) // BLOCK_SIZE)
    print("executor  batch  step, us  overhead, us  plan, bytes: first and second half, per sequence", flush=True)
    for backend in ("inline", "ray"):
        llm = LLM(distributed_executor_backend=backend, block_size=BLOCK_SIZE, num_gpu_blocks_override=blocks + 1)
        for batch in args.batches:
            print(show(backend, batch, measure(llm, batch, args.output_tokens)), flush=True)
        llm.llm_engine.close()
    print("\nbatch  device idle a step, us: waiting for tokens and planning ahead", flush=True)
    for batch in args.batches:
        idle = []
        for ahead in (False, True):
            llm = LLM(
                block_size=BLOCK_SIZE,
                max_num_seqs=batch,
                num_gpu_blocks_override=blocks + 1,
                async_scheduling=ahead,
            )
            idle.append(measure_idle(llm, batch, args.output_tokens, args.device_ms / 1000))
            llm.llm_engine.close()
        print(f"{batch:5} {idle[0]:10.0f} {idle[1]:10.0f}", flush=True)


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
