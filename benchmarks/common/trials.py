"""Trials: the same questions, answered under different compressions, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean

import msgspec
import torch
from msgspec import Struct

from benchmarks.common.compressions import BLOCK_SIZE
from benchmarks.common.intervals import interval
from benchmarks.common.questions import Questions, QuestionSource
from kvllm import LLM, CompressionConfig, SamplingParams

FULL = "full cache"
REASONER = "reasoner"


class Setting(Struct, frozen=True, kw_only=True):
    """What all trials share. `model`: a checkpoint's directory, or "reasoner", the model of the package."""

    model: str = REASONER
    dtype: str = "float32"
    questions: QuestionSource = QuestionSource()
    max_num_seqs: int = 192
    threads: int = 1


class Trial(Struct, frozen=True, kw_only=True):
    """One way to compress. `budgets`: entries left of each question's cache by policy="threshold"."""

    name: str
    compression: CompressionConfig | None = None
    budgets: list[int] | None = None

    @property
    def block_size(self) -> int:
        return 1 if self.compression and self.compression.policy == "standalone" else BLOCK_SIZE


class Outcome(Struct, kw_only=True):
    """What came of a trial, question by question.

    entries: of the cache when the last token was sampled. tokens: generated. seconds: of the whole trial; trials run
    side by side, so they are no measure of speed.
    """

    right: list[bool]
    exact: list[bool]
    entries: list[int]
    tokens: list[int]
    logical: list[int]
    windows: int
    seconds: float

    @property
    def accuracy(self) -> float:
        return mean(self.right)

    @property
    def kept(self) -> float:
        """Entries held at the end, as a share of those that were computed."""
        return sum(self.entries) / sum(self.logical)


class Job(Struct, kw_only=True):
    setting: Setting
    trial: Trial


# One trial


def run(job: Job) -> Outcome:
    """Answer all questions greedily in one engine, as many at once as it allows."""
    setting, trial = job.setting, job.trial
    torch.set_num_threads(setting.threads)
    questions = setting.questions.load()
    model = {} if setting.model == REASONER else {"model": setting.model}
    llm = LLM(
        **model,
        dtype=setting.dtype,
        block_size=trial.block_size,
        max_num_seqs=min(setting.max_num_seqs, len(questions.prompts)),
        compression=trial.compression,
        **pool(setting, trial, questions),
    )
    budgets = trial.budgets or [None] * len(questions.prompts)
    params = [
        SamplingParams(temperature=0, max_tokens=tokens, budget_tokens=budget)
        for tokens, budget in zip(questions.max_tokens, budgets, strict=True)
    ]
    begin = time.perf_counter()
    answer = llm.chat if questions.chat else llm.generate
    outputs = answer(questions.prompts, params, use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    grades = [questions.grade(i, output.outputs[0].text) for i, output in enumerate(outputs)]
    tokens = [len(output.outputs[0].token_ids) for output in outputs]
    # The token sampled last is never stored.
    logical = [len(output.prompt_token_ids) + n - 1 for output, n in zip(outputs, tokens, strict=True)]
    return Outcome(
        right=[grade.right for grade in grades],
        exact=[grade.exact for grade in grades],
        entries=[n - output.metrics.evicted_entries for output, n in zip(outputs, logical, strict=True)],
        tokens=tokens,
        logical=logical,
        windows=llm.stats().windows_compressed,
        seconds=time.perf_counter() - begin,
    )


def pool(setting: Setting, trial: Trial, questions: Questions) -> dict[str, int]:
    """For the reasoner's problems on the CPU, a KV pool in which all fit; else it is sized by the memory, as ever."""
    if torch.cuda.is_available() or setting.questions.dataset:
        return {}
    longest = max(len(prompt) + n for prompt, n in zip(questions.prompts, questions.max_tokens, strict=True))
    rows = min(setting.max_num_seqs, len(questions.prompts))
    return {"num_gpu_blocks_override": rows * (-(-longest // trial.block_size) + 1)}


# Many trials


def run_all(
    setting: Setting, trials: Sequence[Trial], processes: int, finished: Callable[[Trial, Outcome], None]
) -> dict[str, Outcome]:
    """Run trials side by side, each in a process of its own; `finished` is called for each as it ends.

    Raises RuntimeError with the error of the first trial that failed.
    """
    lock = threading.Lock()

    def run_one(trial: Trial) -> Outcome:
        outcome = run_apart(Job(setting=setting, trial=trial))
        with lock:
            finished(trial, outcome)
        return outcome

    with ThreadPoolExecutor(processes) as executor:
        outcomes = list(executor.map(run_one, trials))
    return {trial.name: outcome for trial, outcome in zip(trials, outcomes, strict=True)}


def run_apart(job: Job) -> Outcome:
    environment = os.environ | {"OMP_NUM_THREADS": str(job.setting.threads)}
    command = [sys.executable, "-m", "benchmarks.common.run_trial"]
    done = subprocess.run(command, input=msgspec.json.encode(job), capture_output=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{job.trial.name}: {done.stderr.decode()[-2000:]}")
    return msgspec.json.decode(done.stdout, type=Outcome)


def percent(outcome: Outcome) -> str:
    """Accuracy with its interval."""
    low, high = interval(sum(outcome.right), len(outcome.right))
    return f"{100 * outcome.accuracy:.1f} [{100 * low:.0f}, {100 * high:.0f}]"
