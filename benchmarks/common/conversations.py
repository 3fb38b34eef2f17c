"""Conversations of several turns with an engine, measured turn by turn."""

from __future__ import annotations

import time
from typing import Any

from msgspec import Struct

from benchmarks.common.internals import engine_of
from kvllm import LLM, SamplingParams


class Conversations(Struct):
    """What a process does.

    texts: by conversation, the tokens of each turn of its user. output_len: tokens of an answer.
    first_turn: from which on it is measured; those before are not run, and their answers are those of `answers`.
    """

    model: str
    engine: dict[str, Any]
    texts: list[list[list[int]]]
    output_len: int
    at_once: int
    first_turn: int = 0
    answers: list[list[list[int]]] = []


class Turns(Struct):
    """By turn, over all conversations: prompt tokens, those that were computed, seconds to the first token.

    answers: by conversation and turn.
    """

    prompt_tokens: list[int]
    computed_tokens: list[int]
    host_hits: list[int]
    first_token_seconds: list[list[float]]
    seconds: list[float]
    answers: list[list[list[int]]]


def run(job: Conversations) -> Turns:
    llm = LLM(job.model, **job.engine)
    llm.generate([[1] * 64], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)  # warms up
    histories = [_history(job, i) for i in range(len(job.texts))]
    found = Turns([], [], [], [], [], [answers[:] for answers in job.answers] or [[] for _ in job.texts])
    for turn in range(job.first_turn, len(job.texts[0])):
        stats = llm.stats()
        before = stats.prompt_tokens, stats.prefix_cache_hits, stats.prefix_host_hits
        begin, first_tokens = time.perf_counter(), []
        for first in range(0, len(job.texts), job.at_once):
            group = range(first, min(first + job.at_once, len(job.texts)))
            for i in group:
                histories[i] += job.texts[i][turn]
            first_tokens += _answer(llm, [histories[i] for i in group], job.output_len, found.answers, group)
            for i in group:
                histories[i] += found.answers[i][turn]
        found.seconds.append(time.perf_counter() - begin)
        prompt, hits, host = stats.prompt_tokens, stats.prefix_cache_hits, stats.prefix_host_hits
        found.prompt_tokens.append(prompt - before[0])
        found.computed_tokens.append(prompt - before[0] - hits + before[1])
        found.host_hits.append(host - before[2])
        found.first_token_seconds.append(first_tokens)
    llm.llm_engine.close()
    return found


def _history(job: Conversations, i: int) -> list[int]:
    """What a conversation's user and the model have said before the first turn that is measured."""
    if not job.first_turn:
        return []
    turns = zip(job.texts[i][: job.first_turn], job.answers[i], strict=True)
    return [token for text, answer in turns for token in (*text, *answer)]


def _answer(
    llm: LLM, prompts: list[list[int]], output_len: int, answers: list[list[list[int]]], group: range
) -> list[float]:
    """Answer prompts that come at once, and note the answers. Returns the seconds to each first token."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    engine = engine_of(llm)
    outputs = [engine.add_request(str(i), prompt, params) for i, prompt in zip(group, prompts, strict=True)]
    while engine.has_unfinished_requests():
        engine.step()
    seconds = []
    for i, output in zip(group, outputs, strict=True):
        if output.error is not None:
            raise output.error
        answers[i].append(list(output.outputs[0].token_ids))
        assert output.metrics.first_token_time is not None
        seconds.append(output.metrics.first_token_time - output.metrics.arrival_time)
    return seconds
