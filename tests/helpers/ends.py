"""A model whose texts end at two tokens, each of which some of its files name."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.checkpoints import edit, make_parrot
from tests.helpers.tokenizers import byte_level

END, OTHER = "<|im_end|>", "<|end|>"
CHAIN = ["Ċ", "<think>", "a", "b", END, "c", "d", "</think>", OTHER, "e", "f", "g", "h"]
"""What the model says: it goes on after both ends."""


def make_checkpoint_with_end(path: Path, file: str) -> None:
    """`file` alone names END. The others name OTHER, or none in generation_config.json."""
    tokenizer = byte_level("chat")
    make_parrot(path, tokenizer.hf, CHAIN)
    end, other = tokenizer.hf.convert_tokens_to_ids([END, OTHER])
    edit(path, eos_token_id=end if file == "config.json" else other)
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [end]} if file == "generation_config.json" else {})
    )
    settings = json.loads((path / "tokenizer_config.json").read_text())
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        named = {"eos_token": END} if file == name else {"eos_token": OTHER}
        (path / name).write_text(json.dumps({**(settings if name == "tokenizer_config.json" else {}), **named}))
