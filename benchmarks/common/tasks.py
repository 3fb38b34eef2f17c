"""Tasks of which the answers repeat their prompts more or less: this project's own pages and files as texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [f"docs/{name}.md" for name in ("tiers", "backends", "distributed", "models", "simulation", "troubleshooting")]
FILES = [f"kvllm/core/{name}.py" for name in ("queue", "step", "tables", "preemption", "admission", "batch")]
TASKS: dict[str, tuple[list[str], str]] = {
    "edits": (FILES, "Write this file again, with self called this everywhere, and nothing else changed:\n\n"),
    "summaries": (PAGES, "Sum up the most important points of this page:\n\n"),
    "quotations": (PAGES, "Answer with sentences of the page, word by word: what are its limits?\n\n"),
    "stories": (PAGES, "Tell a story in which one of these words matters:\n\n"),
}


def prompts(tokenizer: Any, length: int) -> dict[str, list[str]]:
    """By the kind of task, each with a text of `length` tokens."""
    found = {}
    for kind, (paths, task) in TASKS.items():
        texts = [(ROOT / path).read_text() for path in paths]
        found[kind] = [task + str(tokenizer.decode(tokenizer.encode(text)[:length])) for text in texts]
    return found
