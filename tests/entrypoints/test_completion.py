"""Shell completion, tried in the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("shtab", reason='needs shtab: pip install "kvllm[serve]"')

from kvllm.entrypoints import cli

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
${COMPLETER} 2> /dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(tmp_path, capsys):
    def write(shell: str) -> str:
        cli.main(["completion", shell])
        path = tmp_path / shell
        path.write_text(capsys.readouterr().out)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["kvllm", "co"], {"compare", "complete", "completion"}),
        (["kvllm", "bench", "s"], {"serve"}),
        (["kvllm", "bench", "serve", "--goo"], {"--goodput"}),
        (["kvllm", "bench", "serve", "--dataset-name", "r"], {"random"}),
        (["kvllm", "completion", "f"], {"fish"}),
        (["kvllm", "serve", "--swap", "a"], {"auto", "always"}),
    ],
)
def test_bash_completes(script, words, expected):
    path = script("bash")
    with open(path) as file:
        completer = next(line.split()[4] for line in file if line.startswith("complete -o"))
    command = ["bash", "-c", ASK, "bash", path, *words]
    done = subprocess.run(
        command, env={**os.environ, "COMPLETER": completer}, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_have_the_syntax_of_their_shells(script, shell):
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}, which is not installed")
    subprocess.run([shell, "-n", script(shell)], check=True)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_know_every_command(script, shell):
    with open(script(shell)) as file:
        text = file.read()
    assert all(command in text for command in cli.COMMANDS) and "goodput" in text


def test_the_command_line_needs_no_package_of_the_clients():
    """Help works where none of them is installed, and a command that needs one says how to get it."""
    absent = "{name: None for name in ('aiohttp', 'httpx2', 'shtab', 'starlette', 'prometheus_client', 'torch')}"
    code = f"import sys; sys.modules.update({absent}); from kvllm.entrypoints import cli; cli.main(sys.argv[1:])"
    command = [sys.executable, "-c", code]
    assert subprocess.run([*command, "--help"], capture_output=True).returncode == 0
    done = subprocess.run([*command, "completion", "bash"], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install 'kvllm[serve]'" in done.stderr
