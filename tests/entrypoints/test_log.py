"""The package's log: one logger, one handler, a level from the environment, and a line when an engine starts."""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvllm import LLM, CompressionConfig, ConfigError, log
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.tokenizers import byte_level


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The package's logger as it is before the import."""
    monkeypatch.delenv(log.VARIABLE, raising=False)
    logger = logging.getLogger("kvllm")
    handlers, level = logger.handlers, logger.level
    logger.handlers = []
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers = handlers
    logger.setLevel(level)


def set_handlers(monkeypatch: pytest.MonkeyPatch, *handlers: logging.Handler) -> None:
    """Instead of pytest's, which are there again in each phase of a test."""
    monkeypatch.setattr(logging.getLogger(), "handlers", list(handlers))


def test_one_handler_on_the_packages_logger_alone(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    set_handlers(monkeypatch)
    log.set_up()
    log.set_up()
    assert len(logger.handlers) == 1 and not logging.getLogger().handlers
    logging.getLogger("kvllm.core").info("seen")
    logging.getLogger("kvllm.core").debug("not seen")
    logging.getLogger("another").info("not seen")
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.startswith("INFO ") and shown.err.endswith(" kvllm.core: seen\n")


@pytest.mark.parametrize(("level", "shown"), [("debug", 4), ("INFO", 3), ("WARNING", 2), ("Error", 1), ("CRITICAL", 0)])
def test_the_level(logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, level: str, shown: int):
    set_handlers(monkeypatch)
    monkeypatch.setenv(log.VARIABLE, level)
    log.set_up()
    for name in ("debug", "info", "warning", "error"):
        getattr(logger, name)("a line")
    assert capsys.readouterr().err.count("a line") == shown


def test_no_level(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log.VARIABLE, "loud")
    with pytest.raises(ConfigError, match="KVLLM_LOG_LEVEL='loud' is not allowed: choose one of DEBUG, INFO, WARNING"):
        log.set_up()


def test_an_applications_level_and_handlers_come_first(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    records: list[logging.LogRecord] = []

    class Application(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger.setLevel(logging.WARNING)
    log.set_up()
    set_handlers(monkeypatch, Application())
    logger.info("not seen")
    logger.warning("once")
    assert [record.getMessage() for record in records] == ["once"] and capsys.readouterr().err == ""


def test_lines_are_back_behind_a_progress_bar(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    child = logging.getLogger("kvllm.some_module")
    with caplog.at_level(logging.INFO, "kvllm"):
        with pytest.raises(KeyboardInterrupt), log.warnings_only(child.name):
            child.info("hidden")
            child.warning("a warning")
            raise KeyboardInterrupt
        child.info("shown")
    assert [record.getMessage() for record in caplog.records] == ["a warning", "shown"]


def test_an_engine_says_what_was_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    compression = CompressionConfig(method="keydiff", policy="pressure", window_blocks=3, buffer=4)
    sizes = {"block_size": 16, "num_gpu_blocks_override": 64, "device": "cpu"}
    with caplog.at_level(logging.INFO, "kvllm"):
        LLM(tmp_path, compression=compression, **sizes)
        LLM(tmp_path, attention_backend="reference", **sizes)
    messages = [record.getMessage() for record in caplog.records if record.name == "kvllm.start_report"]
    compressed, plain = messages[::2]  # each with a warning after it, because there is no tokenizer
    assert compressed == (
        f"{tmp_path.name} (LlamaForCausalLM, float32) on cpu; attention backend cpu (the fastest here); KV pool of 64 "
        "blocks of 16 tokens, 0.1 MiB; compression by keydiff, pressure"
    )
    assert "attention backend reference (as asked)" in plain and plain.endswith("; no compression")


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    for with_tokenizer in (False, True):
        caplog.clear()
        if with_tokenizer:
            byte_level("plain").hf.save_pretrained(tmp_path)
        LLM(tmp_path, block_size=16, num_gpu_blocks_override=32, device="cpu")
        found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        expected = f"{tmp_path} has no tokenizer: prompts must be token ids and outputs have no text, so that chats, "
        expected += "stop strings and structured outputs are refused; add its tokenizer.json or tokenizer.model"
        assert found == ([] if with_tokenizer else [expected])


def test_the_reference_never_serves_unnoticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """More query heads share a KV head than the operators allow."""
    heads = {"num_attention_heads": 65, "num_key_value_heads": 1, "head_dim": 4}
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, **heads)
    byte_level("plain").hf.save_pretrained(tmp_path)
    for asked, warned in (("auto", True), ("reference", False)):
        caplog.clear()
        LLM(tmp_path, attention_backend=asked, block_size=16, num_gpu_blocks_override=32, device="cpu")
        found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(found) == warned
        for part in (
            "leaves reference (cpu shares a KV head among at most 64",
            "too slow",
            "what rules the others out",
        ):
            assert not warned or part in found[0]


def test_python_m_kvllm_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py", "simulate", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("kvllm", run_name="__main__")
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: kvllm simulate")
