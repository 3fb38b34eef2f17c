"""Trials: the same questions, answered under different compressions, each in a process of its own."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

import msgspec
import torch
from msgspec import Struct, structs

from benchmarks.common.child import run_child
from benchmarks.common.compressions import BLOCK_SIZE
from benchmarks.common.progress import SECONDS_SIDE_BY_SIDE, show_progress
from benchmarks.common.questions import Questions, QuestionSource
from kvllm import LLM, CompressionConfig, RequestOutput, SamplingParams
from kvllm.engine_args import DEFAULT_MODEL

FULL = "full cache"
REASONER = "reasoner"


class Setting(Struct, frozen=True, kw_only=True):
    """The part that all trials share. model: a checkpoint's directory, or "reasoner" for the model of the package."""

    model: str = REASONER
    dtype: str = "float32"
    questions: QuestionSource = QuestionSource()
    max_num_seqs: int = 192
    threads: int = 1


class Trial(Struct, frozen=True, kw_only=True):
    """One way to compress.

    budgets: KV pairs to which policy="threshold" cuts the cache of each question. retained: KV pairs that
    policy="standalone" keeps of the windows of each question. kv_offloading_size: GiB of host memory, half of it for KV
    pairs that may come back.
    """

    name: str
    compression: CompressionConfig | None = None
    budgets: list[int] | None = None
    retained: list[int] | None = None
    kv_offloading_size: float | None = None

    @property
    def block_size(self) -> int:
        return 1 if self.compression and self.compression.policy == "standalone" else BLOCK_SIZE


class Outcome(Struct, kw_only=True):
    """The result of a trial, question by question.

    cached_lengths: KV pairs in the cache when the last token was sampled. logical_lengths: KV pairs that were computed
    until then. tokens: generated ones. seconds: of the whole trial. Trials run side by side, so this is no measure of
    speed. cpu_seconds: of the processor, for the whole trial. event_seconds: of the compressions; scores that are
    observed while decoding are not part of it. recalled_bytes: that KV pairs took which changed places with dropped
    ones, both ways.
    """

    right: list[bool]
    exact: list[bool]
    cached_lengths: list[int]
    logical_lengths: list[int]
    tokens: list[int]
    windows: int
    seconds: float
    cpu_seconds: float
    event_seconds: float
    recalled_bytes: int = 0

    @property
    def accuracy(self) -> float:
        return mean(self.right)

    @property
    def kept(self) -> float:
        """KV pairs held at the end, as a share of those that were computed."""
        return sum(self.cached_lengths) / sum(self.logical_lengths)


class Job(Struct, kw_only=True):
    setting: Setting
    trial: Trial


# One trial


def run(job: Job) -> Outcome:
    """Answer all questions greedily in one engine, as many at once as it allows."""
    setting, trial = job.setting, job.trial
    torch.set_num_threads(setting.threads)
    questions = setting.questions.load()
    llm = make_engine(setting, trial, questions)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    outputs = answer(llm, trial, questions)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    grades = [questions.grade(i, output.outputs[0].text) for i, output in enumerate(outputs)]
    tokens = [len(output.outputs[0].token_ids) for output in outputs]
    # The token sampled last is never stored.
    lengths = [len(output.prompt_token_ids) + n - 1 for output, n in zip(outputs, tokens, strict=True)]
    return Outcome(
        right=[grade.right for grade in grades],
        exact=[grade.exact for grade in grades],
        cached_lengths=[n - output.metrics.evicted_entries for output, n in zip(outputs, lengths, strict=True)],
        logical_lengths=lengths,
        tokens=tokens,
        windows=llm.stats().windows_compressed,
        recalled_bytes=llm.stats().recalled_bytes,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        event_seconds=event_seconds(llm),
    )


def event_seconds(llm: LLM) -> float:
    """Seconds of all compressions so far: queries computed again, scores, and the movement of KV pairs."""
    stats = llm.stats()
    return stats.recompute_seconds + stats.score_seconds + stats.compact_seconds


def make_engine(setting: Setting, trial: Trial, questions: Questions) -> LLM:
    return LLM(
        path_of(setting),
        dtype=setting.dtype,
        block_size=trial.block_size,
        max_num_seqs=min(setting.max_num_seqs, len(questions.prompts)),
        num_gpu_blocks_override=pool_blocks(setting, trial, questions),
        compression=trial.compression,
        kv_offloading_size=trial.kv_offloading_size,
    )


def path_of(setting: Setting) -> Path:
    return Path(DEFAULT_MODEL if setting.model == REASONER else setting.model)


def pool_blocks(setting: Setting, trial: Trial, questions: Questions) -> int | None:
    """Blocks for all of the reasoner's problems at once. None on a GPU or for a dataset: the memory sizes the pool."""
    if torch.cuda.is_available() or setting.questions.dataset:
        return None
    longest = max(len(prompt) + n for prompt, n in zip(questions.prompts, questions.max_tokens, strict=True))
    running = min(setting.max_num_seqs, len(questions.prompts))
    return running * (-(-longest // trial.block_size) + 1)


def answer(llm: LLM, trial: Trial, questions: Questions) -> list[RequestOutput]:
    """Raises the error of the first question that could not be answered."""
    none = [None] * len(questions.prompts)
    limits = zip(questions.max_tokens, trial.budgets or none, trial.retained or none, strict=True)
    params = [
        SamplingParams(temperature=0, max_tokens=tokens, budget_tokens=budget, retain_blocks=retained)
        for tokens, budget, retained in limits
    ]
    generate = llm.chat if questions.chat else llm.generate
    with show_progress(llm, trial.name, len(questions.prompts), SECONDS_SIDE_BY_SIDE):
        outputs = generate(questions.prompts, params, use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs


# Many trials


def run_all(
    setting: Setting,
    trials: Sequence[Trial],
    processes: int,
    finished: Callable[[Trial, Outcome], None],
    known: Mapping[str, Outcome] | None = None,
) -> dict[str, Outcome]:
    """Run trials side by side, each in a process of its own, and call `finished` for each as it ends.

    known: outcomes of an earlier run by fingerprint; these trials are not run again.

    Raises KvLLMError with the message of the first trial that failed.
    """
    lock = threading.Lock()

    def run_one(trial: Trial) -> Outcome:
        if known and (found := known.get(fingerprint(setting, trial))):
            with lock:
                finished(trial, found)
            return found
        job = Job(setting=setting, trial=trial)
        threads = {"OMP_NUM_THREADS": str(setting.threads)}
        outcome = run_child(run, job, trial.name, threads)
        with lock:
            finished(trial, outcome)
        return outcome

    with ThreadPoolExecutor(processes) as executor:
        outcomes = list(executor.map(run_one, trials))
    return {trial.name: outcome for trial, outcome in zip(trials, outcomes, strict=True)}


def fingerprint(setting: Setting, trial: Trial) -> str:
    """A number for all that decides the answers of a trial."""
    parts = msgspec.json.encode([structs.replace(setting, threads=1), trial])
    return hashlib.sha256(parts).hexdigest()[:16]


def prompts_of(outcome: Outcome) -> list[int]:
    """Tokens of each prompt."""
    lengths = zip(outcome.logical_lengths, outcome.tokens, strict=True)
    return [logical - tokens + 1 for logical, tokens in lengths]
