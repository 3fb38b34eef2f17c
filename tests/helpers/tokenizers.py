"""Small tokenizers that are made on the spot, of the kinds that checkpoints bring."""

from __future__ import annotations

import functools
import tempfile

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from kvllm.tokenizer import Tokenizer, load_tokenizer

# Merges join bytes within characters, characters, and a space with what follows it.
TEXTS = (
    "The quick brown fox isn't lazy: it jumps, and it jumps again. They say that the other dog sleeps all day.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 2))\n",
    "中文字 中国 文字 中文 日本語のあいうえお カタカナ 한글 한국어 한글",
    "😀😀👍🏽👨‍👩‍👧 café naïve é 🇩🇪🇩🇪",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
KINDS = ("chat", "bos", "plain")


@functools.cache
def byte_level(kind: str) -> Tokenizer:
    """Byte-level BPE, saved and loaded as a checkpoint's.

    kind: "chat" has a template and tokens for turns, as Qwen's do; "bos" puts a token before every text, as Llama 3's
    does; "plain" has neither, as GPT-2's.
    """
    chat = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    specials = {"chat": chat, "bos": ["<|begin|>", "<|end|>"], "plain": ["<|end|>"]}
    backend = Backend(models.BPE())
    words = pre_tokenizers.Split(Regex(r"'\w+| ?\w+| ?[^\s\w]+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=specials[kind], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    if kind == "chat":
        backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    if kind == "bos":
        begin = backend.token_to_id("<|begin|>")
        backend.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    bos = "<|begin|>" if kind == "bos" else None
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=specials[kind][-1], bos_token=bos)
    hf.chat_template = CHAT_TEMPLATE if kind == "chat" else None
    with tempfile.TemporaryDirectory() as path:
        hf.save_pretrained(path)
        return load_tokenizer(path)


@functools.cache
def sentencepiece_like() -> Tokenizer:
    """Spaces as a mark, one more in front of a text, unknown characters as bytes: the way of Llama 2."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": byte + 3 for byte in range(256)}}
    merges = []
    for word in ("▁", "▁a", "b", "▁the", "▁Once", "▁upon", "字"):
        for end in range(1, len(word) + 1):
            vocab.setdefault(word[:end], len(vocab))
            vocab.setdefault(word[end - 1], len(vocab))
            if end > 1 and (word[: end - 1], word[end - 1]) not in merges:
                merges.append((word[: end - 1], word[end - 1]))
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))
