"""Texts of six kinds for `kvllm compare --text`, one file a kind, from data that a Debian machine can have.

apt-get install bible-kjv manpages-fr manpages-de groff-base
python -m benchmarks.texts texts
"""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common import command_line

DATASETS = Path(__file__).parents[2] / "shared/data/datasets"
LENGTH = 400_000


def main(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.texts", __doc__)
    parser.add_argument("output", type=Path, help="folder of the texts")
    output = parser.parse_args(arguments).output
    output.mkdir(parents=True, exist_ok=True)
    for kind, write in KINDS.items():
        (output / f"{kind}.txt").write_text(write()[:LENGTH])
        print(output / f"{kind}.txt")


def prose() -> str:
    """The King James Bible from Psalms on, without the numbers of its verses."""
    lines = subprocess.run(["bible", "-f", "Psalms1:1-Rev22:21"], capture_output=True, text=True, check=True).stdout
    return "\n".join(line.partition(" ")[2] for line in lines.splitlines())


def code() -> str:
    """Modules of Python's standard library."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(paths)
    return "\n".join(path.read_text(errors="replace") for path in paths[:30])


def math() -> str:
    return "\n\n".join(f"Problem: {p['problem']}\nSolution: {p['solution']}" for p in _problems("math500"))


def chats() -> str:
    return "".join(
        f"<|im_start|>user\n{p['question']}<|im_end|>\n<|im_start|>assistant\n{p['answer']}<|im_end|>\n"
        for p in _problems("gsm8k")
    )


def manuals(language: str) -> str:
    paths = sorted(Path("/usr/share/man", language, "man1").glob("*.gz"))
    random.Random(0).shuffle(paths)
    pages = b"\n".join(gzip.decompress(path.read_bytes()) for path in paths[:60])
    command = ["groff", "-man", "-Tutf8", "-Kutf8", "-P-c"]
    text = subprocess.run(command, input=pages, capture_output=True, check=True).stdout.decode()
    return re.sub(".\x08", "", text)  # bold and underlined letters are struck twice


def _problems(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATASETS / name / "test.jsonl").read_text().splitlines()]


KINDS: dict[str, Callable[[], str]] = {
    "prose": prose,
    "code": code,
    "math": math,
    "fr": lambda: manuals("fr"),
    "de": lambda: manuals("de"),
    "chats": chats,
}

if __name__ == "__main__":
    command_line.run_script(main)
