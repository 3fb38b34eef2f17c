"""Facts to find again in a long prompt: a list of names with values, or a few needles in sentences that say nothing.

The answers are short, because these problems test the compression of the prompt.
"""

from __future__ import annotations

import random

from benchmarks.reasoner.problems import NAMES, NUM_ASKED, Problem

ADJECTIVES = ["old", "green", "quiet", "large", "strange", "bright", "heavy", "small", "early", "broken"]
NOUNS = ["house", "river", "dog", "garden", "street", "king", "window", "teacher", "mountain", "letter", "ship"]
NOUNS += ["forest"]
VERBS = ["sees", "finds", "follows", "leaves", "likes", "paints", "passes", "remembers"]
VALUE_DIGITS = 3
MAX_NEEDLES = 8


def sentence(rng: random.Random) -> str:
    """A sentence of filler, 12 tokens."""
    first, second = rng.sample(NOUNS, 2)
    return (
        f"then the {rng.choice(ADJECTIVES)} {first} {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {second} "
        f"near the {rng.choice(NOUNS)}. "
    )


def draw_facts(rng: random.Random, count: int) -> dict[str, str]:
    digits = 10**VALUE_DIGITS
    return {name: f"{rng.randrange(digits):0{VALUE_DIGITS}}" for name in rng.sample(NAMES, count)}


def ask(prompt: str, asked: list[str], facts: dict[str, str]) -> Problem:
    answer = "".join(f"{name}{facts[name]}" for name in asked)
    return Problem(f"{prompt}\n?{','.join(asked)}\n", f"so the answer is ?{answer}", answer)


def make_recall(rng: random.Random, pairs: int) -> Problem:
    """`pairs` names with values, one after the other; half of them are asked for. Raises ValueError for too few or
    many."""
    if not NUM_ASKED <= pairs <= len(NAMES):
        raise ValueError(f"pairs is {pairs}; allowed are {NUM_ASKED} to {len(NAMES)}, since every name is one letter")
    facts = draw_facts(rng, pairs)
    prompt = "find: " + ",".join(f"{name}{value}" for name, value in facts.items())
    return ask(prompt, rng.sample([*facts], max(NUM_ASKED, pairs // 2)), facts)


def hide(rng: random.Random, sentences: int, depths: list[float]) -> Problem:
    """A needle at each of `depths` (0: before the first of `sentences` sentences, 1: after the last)."""
    facts = draw_facts(rng, len(depths))
    text = [sentence(rng) for _ in range(sentences)]
    places = sorted(zip([round(depth * sentences) for depth in depths], facts, strict=True), reverse=True)
    for place, name in places:
        text.insert(place, f"note that {name}{facts[name]} is the code. ")
    return ask("read: " + "".join(text), rng.sample([*facts], len(facts)), facts)


def make_needle(rng: random.Random, sentences: int) -> Problem:
    """1 to MAX_NEEDLES needles anywhere in `sentences` sentences, and all are asked for. Raises ValueError below 1."""
    if sentences < 1:
        raise ValueError(f"sentences is {sentences}; at least 1 is allowed")
    return hide(rng, sentences, [rng.random() for _ in range(rng.randint(1, MAX_NEEDLES))])
