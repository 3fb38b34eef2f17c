"""The texts of a comparison: pieces of files, of what comes with Python, or answers to the questions of a dataset."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from kvllm.config import require
from kvllm.errors import ConfigError, RequestError
from kvllm.llm import LLM
from kvllm.sampling_params import SamplingParams
from kvllm.simulation.workload import open_text
from kvllm.tokenizer import Tokenizer

QUESTION_FIELDS = ("problem", "question", "prompt")
MOST_CHARACTERS = 16
"""Of a token, on average: no more of a text is read for a piece."""
LEAST_OUTPUT = 16


class Text(Struct, frozen=True):
    """kind: what the text is of. prompt: its first tokens. output: what is given token by token."""

    kind: str
    prompt: list[int]
    output: list[int]

    @property
    def stored(self) -> int:
        """KV pairs that are computed: the last token is never stored."""
        return len(self.prompt) + len(self.output) - 1


class Cut(NamedTuple):
    """How texts are cut: how many pieces of how many tokens, the first of them a prompt."""

    pieces: int
    length: int
    prompt_tokens: int


def read_files(paths: Sequence[Path]) -> dict[str, str]:
    """The contents of files by their names without endings. Raises ConfigError."""
    found: dict[str, str] = {}
    for path in paths:
        require(path.is_file(), "--text", str(path), "an existing file")
        require(path.stem not in found, "--text", str(path), "one file of each name: it is the name of a kind of text")
        try:
            found[path.stem] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"--text {path} is no text in UTF-8 ({error})") from None
    return found


def shipped_texts() -> dict[str, str]:
    """Texts that come with every Python: the manual of its language, and the source of some modules."""
    import argparse
    import statistics
    import tarfile
    from pydoc_data.topics import topics

    return {
        "prose": "\n".join(topics[name] for name in sorted(topics)),
        "code": "\n".join(inspect.getsource(module) for module in (argparse, statistics, tarfile)),
    }


def cut_texts(sources: Mapping[str, str], cut: Cut, tokenizer: Tokenizer) -> list[Text]:
    """Pieces of all texts, as many of each, spread evenly over each. Raises ConfigError if one is too short."""
    kinds = list(sources)
    require(cut.pieces >= len(kinds), "--pieces", cut.pieces, f"at least one for each text: {', '.join(kinds)}")
    texts = []
    for i, kind in enumerate(kinds):
        number = cut.pieces // len(kinds) + (i < cut.pieces % len(kinds))
        stretch = len(sources[kind]) // number
        for start in (stretch * piece for piece in range(number)):
            part = sources[kind][start : start + min(stretch, MOST_CHARACTERS * cut.length)]
            tokens = _encode(tokenizer, kind, part)[: cut.length]
            allowed = f"at most {len(tokens)} for {number} pieces of the text {kind!r}: lower it, or --pieces"
            require(len(tokens) == cut.length, "--length", cut.length, allowed)
            texts.append(Text(kind, tokens[: cut.prompt_tokens], tokens[cut.prompt_tokens :]))
    return texts


def _encode(tokenizer: Tokenizer, kind: str, text: str) -> list[int]:
    try:
        return tokenizer.encode(text)
    except RequestError as error:
        raise ConfigError(f"the text {kind!r} cannot be read by this model: {error}: give others with --text") from None


def read_questions(path: Path, number: int) -> list[str]:
    """Questions of a JSONL file, spread evenly over it. Raises ConfigError."""
    fields = " or ".join(map(repr, QUESTION_FIELDS))
    questions = []
    with open_text(path) as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                questions.append(str(next(record[field] for field in QUESTION_FIELDS if field in record)))
            except (json.JSONDecodeError, StopIteration, TypeError):
                raise ConfigError(f"--dataset {path}: line {line_number} is no JSON object with {fields}") from None
    allowed = f"a file with at least one line, a JSON object with {fields}"
    require(bool(questions), "--dataset", str(path), allowed)
    number = min(number, len(questions))
    return [questions[len(questions) * i // number] for i in range(number)]


def answer(llm: LLM, kind: str, questions: Sequence[str], length: int) -> list[Text]:
    """The answers of the model itself, at most so long with their questions. Raises ConfigError if all are too short.

    llm: an engine that drops nothing, with a `max_model_len` of `length`.
    """
    params = SamplingParams(temperature=0, max_tokens=None)
    if llm.tokenizer is not None and llm.tokenizer.hf.chat_template is not None:
        outputs = llm.chat([[{"role": "user", "content": each}] for each in questions], params, use_tqdm=False)
    else:
        outputs = llm.generate([f"{each}\n" for each in questions], params, use_tqdm=False)
    texts = [
        Text(kind, list(output.prompt_token_ids), list(output.outputs[0].token_ids))
        for output in outputs
        if output.error is None and len(output.outputs[0].token_ids) >= LEAST_OUTPUT
    ]
    allowed = f"questions with answers of {LEAST_OUTPUT} to {length} tokens, question included: raise --length?"
    require(bool(texts), "--dataset", kind, allowed)
    return texts
