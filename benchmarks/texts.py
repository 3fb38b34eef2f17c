"""Texts for `kvllm compare --text`: of six kinds, one file a kind, from data that a Debian machine can have.

    apt-get install bible-kjv manpages-fr manpages-de groff-base
    python -m benchmarks.texts texts
    python -m benchmarks.texts retrieval --retrieval models/SmolLM2-135M-Instruct

With `--retrieval`, texts whose last quarter can be told from their first three alone; its loss is then what a method
costs those who look something up:

- `copied`: source code that stands at the beginning is written once more.
- `asked_after`: a list of numbers, of which some are asked for at the end; `asked_before`: the first line names these.
- `turns`: a dialogue in which a user tells facts and, in the last turns, asks for them again.
"""

from __future__ import annotations

import gzip
import inspect
import json
import random
import re
import subprocess
import sysconfig
import tarfile
from collections.abc import Callable, Iterable, Sequence
from itertools import count, islice
from pathlib import Path

from benchmarks.common import command_line
from kvllm.tokenizer import Tokenizer, load_tokenizer

DATASETS = Path(__file__).parents[2] / "shared/data/datasets"
LENGTH = 400_000
NAMES = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet")
NAMES += ("jetty", "koala", "larch", "maple", "north", "olive", "pearl", "quartz", "river")
SUBJECTS = ("dentist", "train", "parcel", "garden", "meeting", "recipe", "guitar", "bicycle", "passport", "library")
SUBJECTS += ("neighbour", "landlord")
ANSWERS = "How good. Noted: {}. What else?", "Thank you, I will keep in mind that it is {}.", "So it is {}. Go on."


def main(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.texts", __doc__)
    add = parser.add_argument
    add("output", type=Path, help="folder of the texts")
    add("--retrieval", metavar="DIR", help="texts to look things up in; a checkpoint, for its tokenizer")
    add("--length", type=int, default=1536, metavar="N", help="tokens of such a text (default: 1536)")
    add("--texts", type=int, default=4, metavar="N", help="of each of its kinds (default: 4)")
    args = parser.parse_args(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.retrieval is None:
        for kind, write in KINDS.items():
            (args.output / f"{kind}.txt").write_text(write()[:LENGTH])
            print(args.output / f"{kind}.txt")
        return
    tokenizer = load_tokenizer(args.retrieval)
    for kind, write in RETRIEVAL_KINDS.items():
        for i in range(args.texts):
            (args.output / f"{kind}_{i}.txt").write_text(write(tokenizer, args.length, random.Random(f"{kind} {i}")))


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


def copied(tokenizer: Tokenizer, length: int, rng: random.Random) -> str:
    source = inspect.getsource(tarfile)
    start = source.index("\n", rng.randrange(len(source) // 2)) + 1
    tokens = tokenizer.encode(source[start : start + 8 * length])[: length * 3 // 4]
    first = tokenizer.decode(tokens[: length // 3])
    return f"{tokenizer.decode(tokens)}\n{first}"


def asked_after(tokenizer: Tokenizer, length: int, rng: random.Random, before: bool = False) -> str:
    names = [f"{a} {b}" for a in NAMES for b in NAMES]
    rng.shuffle(names)
    numbers = {name: rng.randrange(100, 1000) for name in names}
    each = len(tokenizer.encode("The number of amber birch is 123.\n"))
    asked = names[: length // 4 // each + 1]
    first = f"Remember the numbers of {', '.join(asked)}.\n" if before else ""
    told = names[: (length * 3 // 4 - len(tokenizer.encode(first))) // each]
    rng.shuffle(told)
    rng.shuffle(asked)
    return first + "".join(f"The number of {name} is {numbers[name]}.\n" for name in (*told, *asked))


def asked_before(tokenizer: Tokenizer, length: int, rng: random.Random) -> str:
    return asked_after(tokenizer, length, rng, before=True)


def turns(tokenizer: Tokenizer, length: int, rng: random.Random) -> str:
    told: list[tuple[str, str]] = []

    def facts() -> Iterable[str]:
        for i in count():
            subject = f"{rng.choice(SUBJECTS)} number {i + 1}"
            place = f"{rng.choice(NAMES)} street {rng.randrange(10, 99)}"
            told.append((subject, place))
            answer = rng.choice(ANSWERS).format(place)
            yield f"User: My {subject} is at {place}.\nAssistant: {answer}\n"

    first = _fill(tokenizer, facts(), length * 3 // 4)
    rng.shuffle(told)
    questions = (f"User: Where is my {subject}?\nAssistant: It is at {place}.\n" for subject, place in told)
    return first + _fill(tokenizer, questions, length // 4 + 32)


def _fill(tokenizer: Tokenizer, parts: Iterable[str], length: int) -> str:
    """Parts that have together at least `length` tokens."""
    text = ""
    for part in islice(parts, length):
        text += part
        if len(tokenizer.encode(text)) >= length:
            break
    return text


KINDS: dict[str, Callable[[], str]] = {
    "prose": prose,
    "code": code,
    "math": math,
    "fr": lambda: manuals("fr"),
    "de": lambda: manuals("de"),
    "chats": chats,
}
RETRIEVAL_KINDS: dict[str, Callable[[Tokenizer, int, random.Random], str]] = {
    "copied": copied,
    "asked_after": asked_after,
    "asked_before": asked_before,
    "turns": turns,
}


if __name__ == "__main__":
    command_line.run_script(main)
