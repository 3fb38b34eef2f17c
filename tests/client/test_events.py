"""Answers of servers: events cut anywhere, chunks with and without tokens, errors of several shapes."""

from __future__ import annotations

import json

import pytest

from kvllm.client.events import EventReader, decode_chunk, problem_of
from kvllm.errors import ServerError

STREAM = b': keep-alive\n\ndata: {"a": 1}\n\nevent: x\r\ndata: one\r\ndata: two\r\n\r\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_may_be_cut_anywhere(size):
    reader = EventReader()
    found = [event for i in range(0, len(STREAM), size) for event in reader.feed(STREAM[i : i + size])]
    assert found == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


def test_an_event_without_its_end_is_not_told():
    reader = EventReader()
    assert reader.feed(b"data: half") == [] and reader.feed(b"\n") == [] and reader.feed(b"\n") == [b"half"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"text": "a", "finish_reason": None}, True),
        ({"text": "", "finish_reason": None}, True),  # a token whose text is held back
        ({"text": "a", "finish_reason": "length"}, True),
        ({"text": "", "finish_reason": "stop"}, False),
        ({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, False),
        ({"delta": {"role": "assistant", "content": "a"}, "finish_reason": None}, True),
        ({"delta": {}, "finish_reason": None}, True),
        ({"delta": {"reasoning": "a"}, "finish_reason": None}, True),
        ({"delta": {"reasoning_content": "a"}, "finish_reason": None}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
    ],
)
def test_which_chunks_bring_a_token(choice, expected):
    (found,) = decode_chunk(json.dumps({"choices": [choice]}).encode()).choices
    assert found.has_token is expected


def test_what_is_no_chunk_is_refused():
    with pytest.raises(ServerError, match="no chunk"):
        decode_chunk(b'{"choices": 3}')


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b'{"error": {"message": "too long", "type": "BadRequestError", "code": 400}}', "BadRequestError", "too long"),
        (b'{"object": "error", "message": "too long", "code": 400}', "400", "too long"),
        (b'{"detail": "Not Found"}', "", "Not Found"),
        (b'{"error": "Unauthorized"}', "", "Unauthorized"),
        (b"<html>bad gateway</html>", "", "<html>bad gateway</html>"),
        (b"", "", ""),
    ],
)
def test_errors_of_several_servers(body, kind, message):
    problem = problem_of(body)
    assert (problem.kind, problem.message) == (kind, message)
