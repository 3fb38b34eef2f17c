"""Questions with answers that can be graded: the reasoner's problems, or a file of mathematics (MATH-500, AIME)."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from benchmarks.reasoner.problems import grade as grade_problem
from benchmarks.reasoner.tasks import DEFAULT_TASK, TASKS, make_problem
from benchmarks.reasoner.tokenizer import encode
from kvllm.config import require
from kvllm.errors import ConfigError

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
QUESTION_FIELDS = ("problem", "question")


class Grade(NamedTuple):
    """right: the answer is. exact: every token of the working is, too, where there is one to compare with."""

    right: bool
    exact: bool


class Questions(ABC):
    """A list of questions.

    prompts: for `LLM.generate`, or conversations for `LLM.chat` if `chat` is set. max_tokens: of each answer.
    """

    chat = False
    prompts: list[Any]
    max_tokens: list[int]

    @abstractmethod
    def grade(self, index: int, text: str) -> Grade:
        """Judge the text generated for a question."""

    @abstractmethod
    def describe(self) -> str:
        """The questions in one line."""


class QuestionSource(Struct, frozen=True, kw_only=True):
    """The questions that a command line names.

    task, sizes: a task of the reasoner, its smallest and its largest problem. dataset: instead of these, a JSONL file
    with `problem` (or `question`) and `answer` in each line. limit: most tokens of an answer to a dataset's question.
    """

    task: str = DEFAULT_TASK
    sizes: tuple[int, int] = (18, 26)
    count: int = 300
    seed: int = 1
    dataset: str | None = None
    limit: int = 8192

    def __post_init__(self) -> None:
        require(self.count >= 1, "--problems", self.count, "at least 1")
        require(self.limit >= 1, "--max-tokens", self.limit, "at least 1")
        if self.dataset is None:
            task, (low, high) = TASKS[self.task], self.sizes
            fits = task.smallest <= low <= high <= task.largest
            allowed = f"two numbers of {task.unit} from {task.smallest} to {task.largest}, the smaller one first"
            require(fits, "--sizes", self.sizes, allowed)

    def load(self) -> Questions:
        """Raises ConfigError if the dataset cannot be read."""
        return ReasonerQuestions(self) if self.dataset is None else Mathematics(self)


class ReasonerQuestions(Questions):
    """Problems with a known working, word by word."""

    def __init__(self, source: QuestionSource) -> None:
        rng = random.Random(f"questions/{source.seed}")
        self.source = source
        self.problems = [make_problem(rng, rng.randint(*source.sizes), source.task) for _ in range(source.count)]
        self.prompts = [problem.prompt for problem in self.problems]
        self.working_tokens = [len(encode(problem.working)) for problem in self.problems]
        self.max_tokens = [tokens + 16 for tokens in self.working_tokens]

    def grade(self, index: int, text: str) -> Grade:
        return Grade(*grade_problem(self.problems[index], text))

    def describe(self) -> str:
        low, high = self.source.sizes
        prompt = sum(len(encode(prompt)) for prompt in self.prompts) / len(self.prompts)
        working = sum(self.working_tokens) / len(self.prompts)
        return (
            f"{len(self.prompts)} problems of the reasoner ({self.source.task}, {low} to {high} "
            f"{TASKS[self.source.task].unit}): on average {prompt:.0f} tokens of prompt and {working:.0f} of working"
        )


class Mathematics(Questions):
    """Questions with one expression as the answer. math-verify decides whether two forms of it are equal."""

    chat = True

    def __init__(self, source: QuestionSource) -> None:
        assert source.dataset is not None
        self.path = Path(source.dataset)
        records = read_records(self.path)[: source.count]
        self.questions = [question for question, _ in records]
        self.answers = [answer for _, answer in records]
        self.prompts = [[{"role": "user", "content": f"{question}\n{INSTRUCTION}"}] for question in self.questions]
        self.max_tokens = [source.limit] * len(records)

    def grade(self, index: int, text: str) -> Grade:
        right = same_answer(self.answers[index], text)
        return Grade(right, right)

    def describe(self) -> str:
        return f"{len(self.prompts)} questions of {self.path.name}, at most {self.max_tokens[0]} tokens each"


def read_records(path: Path) -> list[tuple[str, str]]:
    """Question and answer of every line. Raises ConfigError for a file that is missing or has other lines."""
    if not path.is_file():
        raise ConfigError(f"--dataset {path}: no such file; give a JSONL file with 'problem' and 'answer' in each line")
    records = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
            question = next(record[field] for field in QUESTION_FIELDS if field in record)
            records.append((str(question), str(record["answer"])))
        except (json.JSONDecodeError, StopIteration, KeyError, TypeError):
            fields = f"{' or '.join(map(repr, QUESTION_FIELDS))} and 'answer'"
            raise ConfigError(f"--dataset {path}: line {number} is no JSON object with {fields}") from None
    require(bool(records), "--dataset", str(path), "a file with at least one line")
    return records


def same_answer(answer: str, text: str) -> bool:
    """Whether the end of `text`, boxed or not, equals `answer` (LaTeX without dollar signs).

    Only the main thread may call this: math-verify ends endless simplifications with a signal.
    """
    from math_verify import parse, verify

    return verify(parse(f"${answer}$"), parse(text))
