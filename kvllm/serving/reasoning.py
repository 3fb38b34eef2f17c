"""Thoughts of reasoning models: told apart from the answer, however the text is cut into pieces."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from kvllm.errors import ConfigError
from kvllm.serving import harmony
from kvllm.serving.tags import unfinished_tag


@dataclass(frozen=True)
class ThoughtTags:
    """The texts that a model writes around its thought. others: more texts that its parser has to see. openings: that
    may stand between a thought and the answer."""

    start: str
    end: str
    others: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()


THINK = ThoughtTags("<think>", "</think>")
FINAL = f"{harmony.CHANNEL}final{harmony.MESSAGE}"
HARMONY = ThoughtTags(
    f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",
    harmony.END,
    harmony.TAGS,
    (FINAL, f"{harmony.START}assistant{FINAL}"),
)
# The names of vLLM. What differs between models with the same tags is whether the chat template opens the thought, as
# the rendered prompt shows. `openai_gptoss` is read by `kvllm.serving.harmony`.
REASONING_PARSERS = {
    "deepseek_r1": THINK,
    "deepseek_v3": THINK,
    "glm45": THINK,
    "granite": ThoughtTags("Here is my thought process:", "Here is my response:"),
    "holo2": THINK,
    "kimi_k2": THINK,
    "mimo": THINK,
    "minimax_m2": THINK,
    "mistral": ThoughtTags("[THINK]", "[/THINK]"),
    "nemotron_v3": THINK,
    "olmo3": THINK,
    "openai_gptoss": HARMONY,
    "qwen3": THINK,
    "seed_oss": ThoughtTags("<seed:think>", "</seed:think>"),
    "step3": THINK,
}
OWN_TAGS = "tags:"
"""In front of the tags themselves, `tags:<START>,<END>`, in place of a name."""


def thought_tags(name: str) -> ThoughtTags:
    """The tags of a `--reasoning-parser`. Raises ConfigError."""
    if name.startswith(OWN_TAGS):
        start, _, end = name.removeprefix(OWN_TAGS).partition(",")
        if not start or not end:
            raise ConfigError(f"reasoning_parser={name!r} is not allowed: write tags:START,END, as in tags:<a>,</a>")
        return ThoughtTags(start, end)
    if name not in REASONING_PARSERS:
        names = ", ".join(REASONING_PARSERS)
        raise ConfigError(f"reasoning_parser={name!r} is not known: choose auto, tags:START,END or one of {names}")
    return REASONING_PARSERS[name]


def is_thought_open(prompt: str, tags: ThoughtTags, continued: str = "") -> bool:
    """Whether the model goes on inside a thought.

    prompt: as the chat template has rendered it. continued: the text of the assistant's message that the model
    continues, if it does not begin one.
    """
    if prompt.rstrip().endswith(tags.start):
        return True
    return continued.rfind(tags.start) > continued.rfind(tags.end)


def is_thought_over(prompt: str, tags: ThoughtTags) -> bool:
    """Whether the prompt ends with a thought that is over, as templates write it to forbid one."""
    return prompt.rstrip().endswith(tags.end)


class State(Enum):
    """Where a completion is. BEGIN: nothing was written yet but white space, so that a thought may still be opened."""

    BEGIN = auto()
    THOUGHT = auto()
    ANSWER = auto()


class ReasoningParser:
    """Splits a completion into its thought, which comes first if there is one, and the answer.

    Line breaks around the thought belong to neither: templates put them back. A thought that never ends is a thought.

    is_open: whether the prompt has opened the thought.
    """

    def __init__(self, tags: ThoughtTags, is_open: bool) -> None:
        self._tags = tags
        self._state = State.THOUGHT if is_open else State.BEGIN
        self._held = ""
        self._has_thought = False  # any text of it
        self._strips_answer = False
        self.has_ended_thought = False

    @property
    def in_answer(self) -> bool:
        return self._state is State.ANSWER

    def push(self, piece: str) -> tuple[str, str]:
        """What is new of the thought and of the answer."""
        text, self._held = self._held + piece, ""
        thought = ""
        if self._state is State.BEGIN:
            text = self._begin(text)
        if self._state is State.THOUGHT:
            thought, text = self._think(text)
        return thought, self._answer(text) if self._state is State.ANSWER else ""

    def finish(self) -> tuple[str, str]:
        """The text held back that has become neither tag nor line break in between."""
        held, self._held = self._held, ""
        if self._state is State.THOUGHT:
            return self._thought(held).rstrip("\n"), ""
        return "", held

    def _begin(self, text: str) -> str:
        """The text after the opening tag, or all of it if there is none."""
        stripped = text.lstrip()
        if stripped.startswith(self._tags.start):
            self._state = State.THOUGHT
            return stripped[len(self._tags.start) :]
        if self._tags.start.startswith(stripped):
            self._held = text
            return ""
        self._state = State.ANSWER
        return text

    def _think(self, text: str) -> tuple[str, str]:
        """The thought, and the text after its end."""
        thought, tag, rest = text.partition(self._tags.end)
        if tag:
            self._state, self._strips_answer, self.has_ended_thought = State.ANSWER, True, True
            return self._thought(thought).rstrip("\n"), rest
        kept = len(text) - unfinished_tag(text, self._tags.end)
        kept = len(text[:kept].rstrip("\n"))  # they may be the last ones
        self._held = text[kept:]
        return self._thought(text[:kept]), ""

    def _thought(self, text: str) -> str:
        if not self._has_thought:
            text = text.lstrip("\n")
            self._has_thought = bool(text)
        return text

    def _answer(self, text: str) -> str:
        if self._strips_answer:
            text = text.lstrip("\n")
            self._strips_answer = not text
        return text
