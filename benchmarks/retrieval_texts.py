"""Texts whose last quarter can be told from their first three alone, as files for `kvllm compare --text`.

    python -m benchmarks.retrieval_texts models/SmolLM2-135M-Instruct retrieval
    kvllm compare models/SmolLM2-135M-Instruct --text retrieval/*.txt --pieces 16 --length 1536 --needles 0

The loss of the last quarter is then what a method costs those who look something up:

- `copied`: source code that stands at the beginning is written once more.
- `asked_after`: a list of numbers, of which some are asked for at the end; `asked_before`: the first line names these.
- `turns`: a dialogue in which a user tells facts and, in the last turns, asks for them again.
"""

from __future__ import annotations

import inspect
import random
import tarfile
from collections.abc import Callable, Iterable, Sequence
from itertools import count, islice
from pathlib import Path

from benchmarks.common import command_line
from kvllm.tokenizer import Tokenizer, load_tokenizer

NAMES = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet")
NAMES += ("jetty", "koala", "larch", "maple", "north", "olive", "pearl", "quartz", "river")
SUBJECTS = ("dentist", "train", "parcel", "garden", "meeting", "recipe", "guitar", "bicycle", "passport", "library")
SUBJECTS += ("neighbour", "landlord")
ANSWERS = "How good. Noted: {}. What else?", "Thank you, I will keep in mind that it is {}.", "So it is {}. Go on."


def main(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.retrieval_texts", __doc__)
    add = parser.add_argument
    add("model", help="directory of a checkpoint, for its tokenizer")
    add("output", type=Path, help="folder of the texts")
    add("--length", type=int, default=1536, metavar="N", help="tokens of a text (default: 1536)")
    add("--texts", type=int, default=4, metavar="N", help="of each kind (default: 4)")
    args = parser.parse_args(arguments)
    tokenizer = load_tokenizer(args.model)
    args.output.mkdir(parents=True, exist_ok=True)
    for kind, write in KINDS.items():
        for i in range(args.texts):
            (args.output / f"{kind}_{i}.txt").write_text(write(tokenizer, args.length, random.Random(f"{kind} {i}")))


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


KINDS: dict[str, Callable[[Tokenizer, int, random.Random], str]] = {
    "copied": copied,
    "asked_after": asked_after,
    "asked_before": asked_before,
    "turns": turns,
}

if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
