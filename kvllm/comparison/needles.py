"""Needles: a sentence in a text that gives a name a number, which the model is to say when it is asked for the name.

The question is the beginning of the same sentence, so that base models can answer it and no chat template is needed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from kvllm.comparison.texts import Text
from kvllm.errors import ConfigError, RequestError
from kvllm.tokenizer import Tokenizer

NAMES = ("Velmora", "Tarrick", "Oswin", "Brenvale", "Calder", "Mirabel", "Quillon", "Sedgwick")
SPARE = 4
"""Tokens that an answer may have more than the number takes."""


class Needle(NamedTuple):
    """Token ids of the text around a needle and of the question. depth: of the needle, 0 right after the text's
    prompt. tokens: of the answer at most."""

    prompt: int
    haystack: list[int]
    question: list[int]
    number: str
    depth: float
    tokens: int

    @property
    def length(self) -> int:
        return len(self.haystack) + len(self.question) + self.tokens

    def is_found_in(self, answer: str) -> bool:
        """Whether the answer begins with the number."""
        found = re.match(r"\W*(\d+)", answer)
        return found is not None and found.group(1) == self.number


def hide(texts: Sequence[Text], number: int, tokenizer: Tokenizer, seed: int) -> list[Needle]:
    """Needles at depths spread evenly over the outputs of texts, which lose as many tokens at their ends.

    Texts that are too short for a needle get none. Raises ConfigError if the tokenizer lacks their words.
    """
    rng = random.Random(f"needles/{seed}")
    found = []
    for i in range(number):
        text, depth = texts[i % len(texts)], (i + 0.5) / number
        name, value = NAMES[i % len(NAMES)], str(rng.randint(1000, 9999))
        question = f"\nThe secret number of {name} is"
        try:
            needle, asked, answer = (
                tokenizer.encode(part, add_special_tokens=False)
                for part in (f"{question} {value}.\n", question, f" {value}")
            )
        except RequestError as error:
            raise ConfigError(f"this model cannot read needles: {error}: give --needles 0") from None
        tokens = len(answer) + SPARE
        left = len(text.output) - len(needle) - len(asked) - tokens
        if left >= len(needle):
            place = len(text.prompt) + round(depth * left)
            whole = [*text.prompt, *text.output[:left]]
            haystack = [*whole[:place], *needle, *whole[place:]]
            found.append(Needle(len(text.prompt), haystack, asked, value, depth, tokens))
    return found
