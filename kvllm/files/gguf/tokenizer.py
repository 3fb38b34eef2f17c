"""The tokenizer that the metadata of a GGUF file describes.

transformers' converter takes GPT-2's way to split texts where it does not know the file's, and puts no token before
texts of Llama 3. So the vocabulary is converted here, and what is not known is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvllm.errors import CheckpointError
from kvllm.files.gguf.header import Strings
from kvllm.sentencepiece_model import CONTROL, SPACE, UNKNOWN, USER_DEFINED, SentencePieceModel

PREFIX = "tokenizer.ggml."
BYTE = 6
"""The type of tokens that are one byte, beside those of SentencePiece."""
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
END_TOKENS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
)
"""Tokens that end a text or a turn wherever a vocabulary has them, as in llama.cpp: the metadata names one of them."""
NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""Of the special tokens of Phi-3, those that leave the spaces after them."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"\p{Han}+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""One after the other, each on what the earlier ones have left: numbers, then Chinese and Japanese, then the rest."""
GPT2, DIGITS = "", r"\p{N}"
"""GPT-2's expression is that of `ByteLevel` itself; with DIGITS, each digit is cut out before it."""
SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    "qwen35": QWEN35,
    "tekken": TEKKEN,
    "gpt-4o": GPT4O,
    "kimi-k2": KIMI,
    **dict.fromkeys(("deepseek-v3", "joyai-llm"), DEEPSEEK3),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais"), GPT2),
}
"""How llama.cpp splits a text into words, by `tokenizer.ggml.pre`."""
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "tekken")
"""Vocabularies in which a word that is a token is not merged, and a token stands before a text."""


def read_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Raises CheckpointError for a kind that is not read; tokenizers raises where a vocabulary contradicts itself."""
    kind = metadata.get(f"{PREFIX}model")
    tokens = _strings(metadata, "tokens")
    types = _array(metadata, "token_type", len(tokens))
    special = {
        name: tokens[token_id]
        for name, key in SPECIAL.items()
        if isinstance(token_id := metadata.get(f"{PREFIX}{key}_token_id"), int) and 0 <= token_id < len(tokens)
    }
    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata, tokens, types), metadata.get(f"{PREFIX}pre") in WHOLE_WORDS
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata, tokens, types, special), True
    elif kind == "gemma4":
        backend, adds_bos = _with_merges(metadata, tokens, types, special), True
    else:
        raise CheckpointError(
            f"unsupported tokenizer {kind!r:.80} (tokenizer.ggml.model): kvllm reads gpt2 (byte-level BPE), llama "
            "(SentencePiece) and gemma4. Give the directory of another with tokenizer=, or prompts as token ids"
        )
    _surround(backend, metadata, special, adds_bos)
    hf = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **special)
    hf._tokenizer = backend  # not given above, where a large one is copied for seconds
    hf.chat_template = _chat_template(metadata)
    return hf


def eos_tokens(hf: PreTrainedTokenizerBase) -> list[str]:
    """Texts of tokens that end a text or a turn. With gpt-oss, "<|end|>" ends a part of a turn alone."""
    found = {token.content for token in hf.added_tokens_decoder.values()}.intersection(END_TOKENS)
    return sorted(found - {"<|end|>"} if "<|return|>" in found else found)


def _byte_level(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    name = metadata.get(f"{PREFIX}pre")
    if name not in SPLITS:
        raise CheckpointError(
            f"unsupported way to split texts {name!r:.80} (tokenizer.ggml.pre): kvllm knows {', '.join(SPLITS)}. Give "
            "the directory of another tokenizer with tokenizer=, or prompts as token ids"
        )
    whole_words = name in (*WHOLE_WORDS, "kimi-k2")
    tokenizer = Tokenizer(models.BPE(**_bpe(metadata, tokens), ignore_merges=whole_words))
    if name in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()  # as the model's own tokenizer, and not as llama.cpp
    split = SPLITS[name]
    expressions = (split,) if isinstance(split, str) else split
    words = [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions if each]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in (GPT2, DIGITS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, whole])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added(tokens, types))
    return tokenizer


def _with_merges(metadata: dict[str, Any], tokens: list[str], types: list[int], special: dict[str, str]) -> Tokenizer:
    """SentencePiece's pieces, put together by merges that the file has."""
    bpe = models.BPE(**_bpe(metadata, tokens), unk_token=special.get("unk_token"), fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens(_added(tokens, types))
    return tokenizer


def _bpe(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Vocabulary and merges."""
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _strings(metadata, "merges"))]
    return {"vocab": {token: token_id for token_id, token in enumerate(tokens)}, "merges": merges}


def _added(tokens: list[str], types: list[int]) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int], special: dict[str, str]) -> Tokenizer:
    unknown = metadata.get(f"{PREFIX}unknown_token_id", types.index(UNKNOWN) if UNKNOWN in types else 0)
    stripped = []
    if metadata.get("general.architecture") == "phi3":
        stripped = [
            token
            for token, kind in zip(tokens, types, strict=True)
            if kind in (CONTROL, USER_DEFINED) and token not in NOT_STRIPPED
        ]
    model = SentencePieceModel(
        pieces=tokens,
        types=types,
        scores=_array(metadata, "scores", len(tokens)),
        special_tokens=special,
        unknown=unknown if isinstance(unknown, int) and 0 <= unknown < len(tokens) else 0,
        byte_fallback=BYTE in types,
        prefix=metadata.get(f"{PREFIX}add_space_prefix") is not False,
        trims=metadata.get(f"{PREFIX}remove_extra_whitespaces") is True,
        right_stripped=frozenset(stripped),
    )
    return model.convert({}, prefix=True, prefix_everywhere=True)


def _surround(backend: Tokenizer, metadata: dict[str, Any], special: dict[str, str], adds_bos: bool) -> None:
    """Let the tokenizer put tokens before and after a text, as the file says. adds_bos: where it does not."""
    given = metadata.get(f"{PREFIX}add_bos_token")
    before = special.get("bos_token") if (adds_bos if given is None else given is True) else None
    after = special.get("eos_token") if metadata.get(f"{PREFIX}add_eos_token") is True else None
    around = [token for token in (before, after) if token is not None]
    if around:
        template = [*([before] if before else []), "$A", *([after] if after else [])]
        ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(around)]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)


def _chat_template(metadata: dict[str, Any]) -> Any:
    """The text of the template, or those of several by their names."""
    own, names = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.chat_templates")
    chosen = names.read() if isinstance(names, Strings) else []
    named = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in chosen}
    found = {name: text for name, text in named.items() if isinstance(text, str)}
    if not isinstance(own, str):
        return found or None
    return {"default": own, **found} if found else own


def _strings(metadata: dict[str, Any], name: str) -> list[str]:
    found = metadata.get(f"{PREFIX}{name}")
    if not isinstance(found, Strings):
        raise CheckpointError(
            f"the metadata has no {PREFIX}{name}, an array of texts: give a tokenizer with tokenizer="
        )
    return found.read()


def _array(metadata: dict[str, Any], name: str, length: int) -> list[Any]:
    found = metadata.get(f"{PREFIX}{name}")
    if not isinstance(found, np.ndarray) or len(found) != length:
        raise CheckpointError(f"the metadata has no {PREFIX}{name} of {length} numbers, one for each token")
    return found.tolist()
