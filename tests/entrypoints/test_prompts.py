"""The prompts that `generate` and `chat` take: iterators, arrays, conversations, and what is none of these."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvllm import LLM, ConfigError, RequestError, RequestOutput, SamplingParams
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.tokenizers import byte_level

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
LISTS = [[5, 6], [7], [8, 9, 10]]


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    path = tmp_path_factory.mktemp("llama")
    tokenizer = byte_level("chat").hf
    make_checkpoint(path, "llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    tokenizer.save_pretrained(path)
    return LLM(path, block_size=16, num_gpu_blocks_override=60)


def prompts_of(outputs: list[RequestOutput]) -> list[list[int]]:
    assert all(output.error is None and output.finished for output in outputs)
    return [output.prompt_token_ids for output in outputs]


class Lines:
    """An iterable that is no sequence."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(LISTS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LISTS,
        lambda: tuple(LISTS),
        lambda: (prompt for prompt in LISTS),
        lambda: map(list, LISTS),
        lambda: iter(LISTS),
        lambda: Lines(),
        lambda: {"a": LISTS[0], "b": LISTS[1], "c": LISTS[2]}.values(),
        lambda: ({"prompt_token_ids": prompt} for prompt in LISTS),
        lambda: (np.array(prompt) for prompt in LISTS),
        lambda: [np.array(prompt, dtype=np.uint16) for prompt in LISTS],
        lambda: [list(np.array(prompt)) for prompt in LISTS],
        lambda: [torch.tensor(prompt) for prompt in LISTS],
        lambda: [{"prompt_token_ids": np.array(prompt)} for prompt in LISTS],
    ],
)
def test_several_prompts(llm: LLM, make: Callable[[], Any]) -> None:
    assert prompts_of(llm.generate(make(), PARAMS, use_tqdm=False)) == LISTS


@pytest.mark.parametrize(
    "make",
    [
        lambda: [5, 6],
        lambda: (5, 6),
        lambda: iter([5, 6]),
        lambda: range(5, 7),
        lambda: (token_id for token_id in [5, 6]),
        lambda: np.array([5, 6]),
        lambda: list(np.array([5, 6], dtype=np.int32)),
        lambda: torch.tensor([5, 6]),
        lambda: {"prompt_token_ids": np.array([5, 6])},
        lambda: {"prompt_token_ids": torch.tensor([5, 6])},
    ],
)
def test_a_single_prompt_of_token_ids(llm: LLM, make: Callable[[], Any]) -> None:
    assert prompts_of(llm.generate(make(), PARAMS, use_tqdm=False)) == [[5, 6]]


def test_texts_from_iterators_and_arrays(llm: LLM) -> None:
    texts = ["The quick", "brown fox"]
    expected = [llm.tokenizer.encode(text) for text in texts]
    for prompts in (texts, iter(texts), (text for text in texts), np.array(texts), dict.fromkeys(texts)):
        if isinstance(prompts, dict):
            prompts = prompts.keys()
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert prompts_of(outputs) == expected and [output.prompt for output in outputs] == texts


def test_lines_of_a_two_dimensional_array_are_prompts(llm: LLM) -> None:
    assert prompts_of(llm.generate(np.array([[1, 2], [3, 4]]), PARAMS, use_tqdm=False)) == [[1, 2], [3, 4]]
    assert prompts_of(llm.generate(torch.tensor([[1, 2], [3, 4]]), PARAMS, use_tqdm=False)) == [[1, 2], [3, 4]]


@pytest.mark.parametrize("prompts", [5, 3.5, None, np.array(5), np.int64(5), object()])
def test_what_is_no_prompt(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match=r"prompts=.* is not allowed: give a prompt .* or a list of them"):
        llm.generate(prompts, PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (np.array([1.0, 2.0]), "a prompt is a string, a list of token ids or a dict with one of them, not float"),
        ([np.array([1.5])], "a prompt is a list of integer token ids, 1.5 is not one"),
        ([np.array([[1, 2]])], r"a prompt is a list of integer token ids, \[1, 2\] is not one"),
        ([True, False], "a prompt is a string, a list of token ids or a dict with one of them, not bool"),
        ([np.array([True])], "a prompt is a list of integer token ids, True is not one"),
        ([5, [6]], "a prompt is a string, a list of token ids or a dict with one of them, not int"),
    ],
    ids=str,
)
def test_what_is_no_prompt_in_a_list(llm: LLM, prompts: Any, message: str) -> None:
    output = llm.generate(prompts, PARAMS, use_tqdm=False)[0]
    with pytest.raises(RequestError, match=message):
        raise output.error


def test_sampling_params_from_an_iterator(llm: LLM) -> None:
    for params in ([PARAMS, SHORT], iter([PARAMS, SHORT]), (each for each in (PARAMS, SHORT))):
        outputs = llm.generate(iter([[1, 2], [3]]), params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 2]


@pytest.mark.parametrize("params", [{"temperature": 0}, 5, "greedy", [{"temperature": 0}]], ids=str)
def test_what_are_no_sampling_params(llm: LLM, params: Any) -> None:
    with pytest.raises(ConfigError, match="sampling_params"):
        llm.generate([[1]], params, use_tqdm=False)


def test_no_prompts_from_an_iterator(llm: LLM) -> None:
    assert llm.generate(iter([]), use_tqdm=False) == []


def test_an_iterator_that_fails_leaves_nothing(llm: LLM) -> None:
    def prompts() -> Iterator[list[int]]:
        yield [1]
        raise OSError("the file has ended")

    with pytest.raises(OSError, match="the file has ended"):
        llm.generate(prompts(), PARAMS, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


# Conversations


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


GOOD = [user("2+2?"), user("3+3?")]


def test_conversations_from_iterators(llm: LLM) -> None:
    expected = prompts_of(llm.chat(GOOD, PARAMS, use_tqdm=False))
    assert [llm.tokenizer.decode(prompt) for prompt in expected] == [
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ("2+2?", "3+3?")
    ]
    assert prompts_of(llm.chat(iter(GOOD), PARAMS, use_tqdm=False)) == expected
    assert prompts_of(llm.chat((tuple(each) for each in GOOD), PARAMS, use_tqdm=False)) == expected
    assert prompts_of(llm.chat(GOOD[0], PARAMS, use_tqdm=False)) == expected[:1]
    assert prompts_of(llm.chat(iter(GOOD[0]), PARAMS, use_tqdm=False)) == expected[:1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([{"content": "no role"}], r'messages\[0\] must be a dict with a "role"'),
        ([], "messages must be a list of at least one message"),
        ({"role": "user", "content": "not in a list"}, "messages must be a list of at least one message"),
        ("hello", "messages must be a list of at least one message"),
        ([*user("2+2?"), "hello"], r"messages\[1\] must be a dict"),
        (user("long " * 600), "tokens; max_model_len=512 allows 511"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_conversation_has_its_own_error(llm: LLM, bad: Any, message: str) -> None:
    outputs = llm.chat([GOOD[0], bad, GOOD[1]], PARAMS, use_tqdm=False)
    assert outputs[1].finished and not outputs[1].outputs
    with pytest.raises(RequestError, match=message):
        raise outputs[1].error
    assert prompts_of([outputs[0], outputs[2]]) == prompts_of(llm.chat(GOOD, PARAMS, use_tqdm=False))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ({"role": "user", "content": "not in a list"}, "messages must be a list of at least one message, not {'role'"),
        ("hello", "messages must be a list of at least one message, not 'hello'"),
        (5, "messages must be a list of at least one message, not 5"),
        ([], "messages must be a list of at least one message"),
        (["hello"], r"messages\[0\] must be a dict"),
        ([{"content": "no role"}], r"messages\[0\] must be a dict"),
    ],
    ids=str,
)
def test_a_single_bad_conversation_raises(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, PARAMS, use_tqdm=False)


# Interrupts


@pytest.mark.parametrize("where", ["before the second is added", "after it"])
def test_an_interrupt_while_prompts_are_added_leaves_nothing(llm: LLM, where: str) -> None:
    engine = llm.llm_engine
    expected = llm.generate(LISTS, PARAMS, use_tqdm=False)
    add, step, added = engine.add_request, engine.step, list[RequestOutput]()

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.05)

    def interrupted_add(*args: Any, **options: Any) -> RequestOutput:
        second = len(added) == 1
        if second and where == "before the second is added":
            interrupt()
        added.append(add(*args, **options))
        if second and where == "after it":
            interrupt()
        return added[-1]

    def slow_step() -> list[RequestOutput]:
        time.sleep(0.02)  # no request has all of its tokens before the main thread has seen the interrupt
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "add_request", interrupted_add)
        patch.setattr(engine, "step", slow_step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(LISTS, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
    outputs = llm.generate(LISTS, PARAMS, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in expected]
    assert {each.outputs[0].finish_reason for each in added} == {"abort"}
    assert not engine.has_unfinished_requests()
