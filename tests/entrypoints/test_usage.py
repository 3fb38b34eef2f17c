"""Wrong usage of the command `kvllm`: one line of usage, the nearest name, exit code 2."""

from __future__ import annotations

import pytest

import kvllm
from kvllm.entrypoints import cli


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is printed about arguments that end the command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    return printed.err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"kvllm {kvllm.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "usage", "message"),
    [
        (
            ["serve", "--tensor-paralel-size", "2"],
            "kvllm serve [MODEL] [OPTION ...]",
            "kvllm serve: error: unknown option --tensor-paralel-size; did you mean --tensor-parallel-size?",
        ),
        (["serve", "--blok_size=16"], None, "unknown option --blok_size; did you mean --block-size?"),
        (["serve", '--compresion={"policy": "pressure"}'], None, "did you mean --compression?"),
        (
            ["bench", "serve", "--num-promts", "3"],
            None,
            "kvllm bench serve: error: unknown option --num-promts; did you",
        ),
        (
            ["bench", "srve"],
            "kvllm bench BENCHMARK ...",
            "kvllm bench: error: unknown command 'srve'; did you mean serve?",
        ),
        (["simulat"], "kvllm COMMAND ...", "kvllm: error: unknown command 'simulat'; did you mean simulate?"),
        (["--verion"], None, "kvllm: error: unknown option --verion; did you mean --version?"),
        (["run-batch", "--input-fil", "a"], None, "unknown option --input-fil; did you mean --input-file?"),
        (["serve", "--swap", "alwas"], None, "argument --swap: 'alwas' is not allowed; did you mean always?"),
        (["simulate", "--swap", "alwas"], None, "argument --swap: 'alwas' is not allowed; did you mean always?"),
        (["completion", "powershell"], None, "'powershell' is not allowed; choose one of bash, zsh, fish"),
        (["serve", "--ssl-cert-reqs", "9"], None, "argument --ssl-cert-reqs: 9 is not allowed; choose one of 0, 1, 2"),
        (["serve", "--quiet-please"], None, "unknown option --quiet-please; kvllm serve --help lists the options"),
        (["top", "here"], None, "kvllm top: error: unexpected argument 'here'"),
    ],
)
def test_the_nearest_name(arguments, usage, message, capsys):
    lines = refusal(capsys, *arguments).splitlines()
    assert len(lines) == 2 and message in lines[1]
    assert lines[0] == f"usage: {usage}" if usage else lines[0].startswith("usage: kvllm")


@pytest.mark.parametrize(
    "arguments", [["serve", "--max-num", "3"], ["chat", "--temp", "0"], ["bench", "serve", "--num-p", "3"]]
)
def test_no_option_is_abbreviated(arguments, capsys):
    assert f"unknown option {arguments[-2]}" in refusal(capsys, *arguments)


def test_text_that_begins_like_an_option_is_text():
    args = cli.make_parser().parse_args(["complete", "-q", "--is this text?", "--", "--name"])
    assert (args.quick, args.model) == ("--is this text?", "--name")


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (["serve"], []),
        (["run-batch"], ["-i", "a", "-o", "b"]),
        (["plan"], []),
        (["simulate"], ["--hardware", "cpu", "--workload", "w"]),
        (["chat"], []),
        (["complete"], []),
        (["bench", "serve"], []),
    ],
)
def test_the_model_is_an_argument_or_an_option(command, more, capsys):
    names = {"simulate": ["--model-config"], "chat": ["--model-name"], "complete": ["--model-name"]}
    parser = cli.make_parser()
    for given in (["m"], *([name, "m"] for name in ("--model", *names.get(command[0], [])))):
        assert str(parser.parse_args([*command, *given, *more]).model) == "m"
        assert str(parser.parse_args([*command, *more, *given]).model) == "m"
    assert str(parser.parse_args([*command, "m", "--model", "m", *more]).model) == "m"
    assert parser.parse_args([*command, *more]).model is None
    assert "two models are given, m and n: leave one out" in refusal(capsys, *command, "m", "--model", "n", *more)


@pytest.mark.parametrize("command", [["plan"], ["simulate", "--hardware", "cpu", "--workload", "w"]])
def test_a_model_that_is_needed(command, capsys):
    assert f"kvllm {command[0]} needs a model" in refusal(capsys, *command)
