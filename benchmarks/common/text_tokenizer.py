"""A tokenizer for models with random weights, whose tokens are pieces of English and of Python."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[2]


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer of up to `vocab_size` tokens, made from this repository's pages and sources."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    files = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "kvllm").rglob("*.py")])
    tokenizer.train([str(file) for file in files], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
