"""Thoughts and tool calls in text: found wherever the text is cut, and put together as clients do."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvllm.errors import ConfigError
from kvllm.serving.blocks import BlockWriter
from kvllm.serving.chat_format import MessageParser
from kvllm.serving.reasoning import ReasoningParser, is_thought_open, is_thought_over, thought_tags
from kvllm.serving.tool_parsers import HermesParser

TAGS = thought_tags("qwen3")
WORDS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<",
    "</",
    "think>",
    "\n",
    "\n\n",
    " ",
    "a",
    "Hi.",
    "é",
    "{",
    "}",
]
CALLS = [
    '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"</tool_call>", "b": [1, {"c": null}]}}\n</tool_call>',
    '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>',
    '<tool_call>{"name": "h", "arguments": "{\\"y\\": 2}"}</tool_call>',
    '<tool_call>{"name": "i"}</tool_call>',
    '<tool_call>{"name": "j", "arguments": {"a": 1}</tool_call>',
    '<tool_call>{"nome": "j"}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    "<tool_call>no JSON</tool_call>",
    '<tool_call>{"name": "k", "arguments": {"cut": "of',
]


def test_blocks_have_the_order_of_the_text() -> None:
    """However it is cut: a piece may have the end of a call and the text after it, or both and another call."""
    look = '<tool_call>{"name": "look", "arguments": {"city": "Paris"}}</tool_call>'
    text = f"<think>Hm.</think>Let me look.{look}I will wait.{look}"

    def blocks(pieces: list[str]) -> list[tuple[str, str, str]]:
        parser, writer = MessageParser(ReasoningParser(TAGS, False), HermesParser(), None), BlockWriter()
        for piece in pieces:
            writer.push(parser.push(piece, []))
        writer.push(parser.finish())
        return [(block.kind, block.name, block.text) for block in writer.blocks]

    call = ("call", "look", '{"city": "Paris"}')
    whole = [("reasoning", "", "Hm."), ("text", "", "Let me look."), call, ("text", "", "I will wait."), call]
    for length in (1, 2, 3, 7, 20, 60, 90, 140, len(text)):
        assert blocks([text[begin : begin + length] for begin in range(0, len(text), length)]) == whole, length


def test_line_breaks_in_strings_are_escaped() -> None:
    """Models write them as they are, and clients read the arguments as JSON."""
    text = '<tool_call>{"name": "f", "arguments": {"a": "b\n\tc", \n"d": "\\n"}}</tool_call>'
    for length in (1, 5, len(text)):
        parser, found = HermesParser(), ""
        for begin in range(0, len(text), length):
            found += "".join(call.function.arguments for call in parser.push(text[begin : begin + length])[1])
        assert json.loads(found) == {"a": "b\n\tc", "d": "\n"}, found


def texts(words: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(words), max_size=12).map("".join)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(places)]


def split_thought(pieces: list[str], is_open: bool) -> tuple[str, str]:
    parser = ReasoningParser(TAGS, is_open)
    found = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(thought for thought, _ in found), "".join(answer for _, answer in found)


def split_calls(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and the calls as a client adds up their deltas."""
    parser, text, calls = HermesParser(), "", []
    for new, deltas in [*map(parser.push, pieces), parser.finish()]:
        text += new
        for delta in deltas:
            if delta.id:  # the first of a call
                assert delta.type == "function" and delta.index == len(calls)
                calls.append([delta.function.name, ""])
            calls[delta.index][1] += delta.function.arguments
    return text, [tuple(call) for call in calls]


# Thoughts


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "answer"),
    [
        ("<think>\nHm.\n\nYes.\n</think>\n\nHi.", False, "Hm.\n\nYes.", "Hi."),
        ("Hm.\n</think>\n\nHi.\n", True, "Hm.", "Hi.\n"),
        ("\nHm.\n", True, "Hm.", ""),  # cut off
        ("Hm.</thi", True, "Hm.</thi", ""),
        ("Hi. <think>no</think>", False, "", "Hi. <think>no</think>"),
        ("  Hi.", False, "", "  Hi."),
        ("<thi", False, "", "<thi"),
        ("<think></think>Hi.", False, "", "Hi."),
        ("a</think>b</think>c", True, "a", "b</think>c"),
        ("", True, "", ""),
    ],
)  # fmt: skip
def test_a_thought_and_an_answer(text: str, is_open: bool, thought: str, answer: str) -> None:
    assert split_thought([text], is_open) == (thought, answer)


@given(texts(WORDS), st.booleans(), st.lists(st.integers(0, 200)))
@example("<think>\n\na\n</think>\n\nb", False, list(range(40)))
def test_any_cut_gives_the_same_thought(text: str, is_open: bool, cuts: list[int]) -> None:
    assert split_thought(pieces_of(text, cuts), is_open) == split_thought([text], is_open)


def test_the_prompt_tells_whether_a_thought_is_open() -> None:
    assert is_thought_open("...<|Assistant|><think>\n", TAGS)
    assert not is_thought_open("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", TAGS)
    assert not is_thought_open("assistant\n<think>\n\n</think>\n\n", TAGS)
    assert is_thought_over("assistant\n<think>\n\n</think>\n\n", TAGS)
    assert is_thought_open("assistant\n<think>\nI am", TAGS, continued="<think>\nI am")
    assert not is_thought_open("assistant\n<think>I</think> am", TAGS, continued="<think>I</think> am")


def test_unknown_parser() -> None:
    with pytest.raises(ConfigError, match="deepseek_r1, .*qwen3"):
        thought_tags("other")


# Tool calls


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (CALLS[0], "", [("f", '{"a": "}\\"</tool_call>", "b": [1, {"c": null}]}')]),
        (CALLS[1], "", [("g", '{"x": 1}')]),
        (CALLS[2], "", [("h", '{"y": 2}')]),
        (CALLS[3], "", [("i", "{}")]),
        (CALLS[4], "", [("j", '{"a": 1}')]),  # a bracket is missing
        (f"{CALLS[4]} and text", " and text", [("j", '{"a": 1}')]),
        (r'<tool_call>{"name": "f", "arguments": {"a": "\\"}}</tool_call> x', " x", [("f", r'{"a": "\\"}')]),
        (CALLS[5], CALLS[5], []),
        (CALLS[6], CALLS[6], []),
        (CALLS[7], CALLS[7], []),
        (CALLS[8], "", [("k", '{"cut": "of')]),
        (f"Sure.\n\n{CALLS[1]}\n{CALLS[3]}\n", "Sure.", [("g", '{"x": 1}'), ("i", "{}")]),
        (f"{CALLS[3]} Done.\n", " Done.", [("i", "{}")]),
        ("Just text with < and <tool \n", "Just text with < and <tool \n", []),
        ("<tool_call>", "<tool_call>", []),
        (f"<tool_call>{CALLS[3]}", "<tool_call>", [("i", "{}")]),
    ],
)  # fmt: skip
def test_calls_and_text(text: str, rest: str, calls: list[tuple[str, str]]) -> None:
    assert split_calls([text]) == (rest, calls)
    assert split_calls(list(text)) == (rest, calls)


@given(texts(WORDS + CALLS * 2), st.lists(st.integers(0, 500)))
def test_any_cut_gives_the_same_calls(text: str, cuts: list[int]) -> None:
    assert split_calls(pieces_of(text, cuts)) == split_calls([text])


def test_arguments_stream() -> None:
    """They come before the call is complete, and in more than one piece."""
    parser = HermesParser()
    parser.push('<tool_call>{"name": "f", "arg')
    (first,) = parser.push('uments": {"a": "on')[1]
    (second,) = parser.push('ly"')[1]
    assert (first.function.name, first.function.arguments) == ("f", '{"a": "on')
    assert second.function.arguments == 'ly"' and not second.id


def test_many_pieces_take_linear_time() -> None:
    long = json.dumps({"name": "f", "arguments": {"a": "x" * 30_000}})
    text, calls = split_calls(list(f"<tool_call>{long}</tool_call>"))
    assert text == "" and len(calls[0][1]) > 30_000
