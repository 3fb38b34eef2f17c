"""Batch files: what is no request or no answer, an end that was cut, and one writer at a time."""

from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("httpx2", reason='needs the packages of the clients: pip install "kvllm[serve]"')

from kvllm.client.batch import BatchError, BatchOutput, BatchResult, check_input
from kvllm.errors import ConfigError


def line(custom_id: str, **more: object) -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    return json.dumps(request | more) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (line("a") + line("b") + line("a"), "lines 1 and 3 have the same custom_id 'a'"),
        (line("a") + "not json\n", "line 2 must be a JSON object"),
        (line("a", body="text"), "line 1 must be"),
    ],
)
def test_a_wrong_input_is_refused_before_anything_runs(tmp_path, text, message):
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        check_input(path)


def test_a_pipe_is_refused(tmp_path):
    """Its requests could not be read a second time, and the answers of an earlier run not at all."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="pipe is a pipe"):
        check_input(path)
    with pytest.raises(ConfigError, match="pipe is a pipe"), BatchOutput.open(path):
        pass


def result(custom_id: str) -> BatchResult:
    return BatchResult("batch_req_1", custom_id, None, BatchError("invalid_request", "no"))


def test_a_cut_end_is_removed_and_the_file_goes_on(tmp_path):
    path = tmp_path / "out.jsonl"
    with BatchOutput.open(path) as output:
        output.add(result("a"))
        output.add(result("b"))
    whole = path.read_bytes()
    for cut in range(len(whole) // 2 + 1, len(whole)):
        path.write_bytes(whole[:cut])
        with BatchOutput.open(path) as output:
            assert output.failed == {"a": True}
            output.add(result("c"))
        ids = [json.loads(each)["custom_id"] for each in path.read_text().splitlines()]
        assert ids == ["a", "c"]


@pytest.mark.parametrize("text", ["my notes\nand more\n", "my notes"])
def test_a_file_with_other_lines_is_left_alone(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line 1 is no answer of a batch"), BatchOutput.open(path):
        pass
    assert path.read_text() == text


def test_a_file_has_one_writer(tmp_path):
    path = tmp_path / "out.jsonl"
    with (
        BatchOutput.open(path),
        pytest.raises(ConfigError, match="written by another process"),
        BatchOutput.open(path),
    ):
        pass
