"""Which of a checkpoint's files decides how texts are encoded: tokenizer.json alone, or tokenizer.model."""

from __future__ import annotations

import functools
import io
import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import generate_merges

from kvllm.errors import CheckpointError
from kvllm.sentencepiece_model import merges_of
from kvllm.tokenizer import load_tokenizer
from tests.helpers.examples import thinned
from tests.helpers.tokenizers import CHAT_TEMPLATE, TEXTS, byte_level, sentencepiece_like

try:
    import sentencepiece
except ModuleNotFoundError:
    sentencepiece = None

REAL = ("Llama-3.2", "Qwen3", "gpt2")
MODEL_TYPES = ("qwen2", "llama", "mistral")
CLASSES = (
    *("LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "Custom"),
    None,
)
PARTS = (
    *(
        "The quick brown fox",
        " isn't",
        "lazy",
        "def f(x):",
        "\n    return",
        "\n\n\n",
        "\r\n",
        "\t",
        " ",
        "    ",
        "e\u0301",
    ),
    *(
        "中文",
        "日本語",
        " あア",
        "한글",
        "Ελλάδα",
        "кириллица",
        "عربي",
        "हिन्दी",
        "ไทย",
        "naïve",
        "ﬁ①",
        "\u3000",
        "\u200b",
    ),
    *("😀", "👍🏽", "👨‍👩‍👧", "🇩🇪", "12345", "3.14", "<0x41>", "▁", "#include", "<?xml", "}};", "//", "\x00"),
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<|begin|>", "<think>", "[PAD]", "<|eot_id|>")


@functools.cache
def strings(special: tuple[str, ...] = ()) -> list[str]:
    """Three hundred texts: code, runs of whitespace, several languages, emoji and tokens' names."""
    draw = random.Random(0)
    runs = [" " * count for count in range(20)] + ["\n" * count + "return" for count in range(5)]
    mixed = ["".join(draw.choices(PARTS + special, k=draw.randint(1, 12))) for _ in range(300 - len(runs) - len(TEXTS))]
    return [*runs, *TEXTS, *mixed]


def write_settings(path: Path, model_type: str | None = None, **settings: Any) -> None:
    (path / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


# tokenizer.json


def word_level(truncated: bool = False) -> Backend:
    """Words, with a token around each text, and another way to split than that of any class of transformers."""
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "the": 3, "fox": 4, "return": 5, "\n": 6, "none": 7, "None": 8}
    backend = Backend(models.WordLevel(words, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    if truncated:
        backend.enable_truncation(4)
        backend.enable_padding(length=30)
    return backend


def digits_alone() -> Backend:
    """Bytes as GPT-2 has them, in another order of steps, with a token whose space belongs to it."""
    backend = Backend.from_str(byte_level("bos").hf.backend_tokenizer.to_str())
    split = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(True)])
    backend.pre_tokenizer, backend.decoder = split, ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", lstrip=True, rstrip=True)])
    return backend


TINY: dict[str, Callable[[], Backend]] = {
    "chat": lambda: byte_level("chat").hf.backend_tokenizer,
    "bos": lambda: byte_level("bos").hf.backend_tokenizer,
    "sentencepiece": lambda: sentencepiece_like().hf.backend_tokenizer,
    "words": word_level,
    "digits": digits_alone,
}


def encodings(encode: Callable[..., list[int]]) -> list[list[int]]:
    return [encode(text, add_special_tokens=special) for special in (True, False) for text in strings(SPECIAL)]


def encodings_of_file(path: Path) -> list[list[int]]:
    backend = Backend.from_file(str(path / "tokenizer.json"))
    return encodings(lambda text, add_special_tokens: backend.encode(text, add_special_tokens=add_special_tokens).ids)


@pytest.mark.parametrize("tiny", thinned(TINY, 3))
def test_the_file_decides(tmp_path: Path, tiny: str) -> None:
    TINY[tiny]().save(str(tmp_path / "tokenizer.json"))
    expected = encodings_of_file(tmp_path)
    around = ({}, {"add_bos_token": False, "add_eos_token": True}, {"add_bos_token": True, "bos_token": "[CLS]"})
    for i, (model_type, kind) in enumerate(itertools.product(MODEL_TYPES, CLASSES)):
        named = {"tokenizer_class": kind} if kind else {}
        write_settings(tmp_path, model_type, eos_token="<|im_end|>", pad_token="[PAD]", **named, **around[i % 3])
        assert encodings(load_tokenizer(tmp_path).encode) == expected, (model_type, kind)


@pytest.mark.parametrize("name", thinned(REAL, 3))
def test_published_files_decide(tmp_path: Path, shared_dir: Path, name: str) -> None:
    """With their own settings, and with those that make transformers encode otherwise."""
    source = shared_dir / "data" / "tokenizers" / name
    if not source.is_dir():
        pytest.skip(f"needs the tokenizer in {source}, which is absent")
    expected = encodings_of_file(source)
    assert encodings(load_tokenizer(source).encode) == expected
    shutil.copy(source / "tokenizer.json", tmp_path)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "LlamaTokenizer",
        "split_special_tokens": True,
        "add_bos_token": name != "Llama-3.2",
    }
    write_settings(tmp_path, "qwen2", **settings)
    assert encodings(load_tokenizer(tmp_path).encode) == expected


def test_texts_are_neither_cut_nor_padded(tmp_path: Path) -> None:
    """As transformers has it: files of published checkpoints have limits from their training."""
    word_level(truncated=True).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the fox " * 4) == [1, *[3, 4] * 4, 2]
    assert tokenizer.encode("fox") == [1, 4, 2]


def test_names_and_templates_are_those_of_transformers(tmp_path: Path) -> None:
    byte_level("chat").hf.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer, expected = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.hf.chat_template == expected.chat_template == CHAT_TEMPLATE
    assert tokenizer.hf.special_tokens_map == expected.special_tokens_map
    assert tokenizer.hf.added_tokens_decoder == expected.added_tokens_decoder
    assert tokenizer.hf.convert_ids_to_tokens(list(range(300))) == expected.convert_ids_to_tokens(list(range(300)))
    assert len(tokenizer.hf) == len(expected)


def test_tokens_that_are_special_by_their_name_alone_are_no_text(tmp_path: Path) -> None:
    """In the file, one of these is a word like any other."""
    word_level().save(str(tmp_path / "tokenizer.json"))
    write_settings(tmp_path, pad_token="absent")
    assert load_tokenizer(tmp_path).eos_token_ids == ()
    write_settings(tmp_path, eos_token="fox", pad_token="absent")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_token_ids == {4}
    assert tokenizer.decode([3, 4, 5], skip_special_tokens=True) == "the return"
    assert tokenizer.decode([3, 4, 5]) == "the fox return"
    assert tokenizer.eos_token_ids == (4,)


@pytest.mark.parametrize("token", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False, "__type": "AddedToken"}])
def test_every_file_may_name_the_end_of_a_text(tmp_path: Path, token: Any) -> None:
    chat = byte_level("chat")
    chat.hf.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    end, other = chat.hf.convert_tokens_to_ids(["<|im_end|>", "<|end|>"])
    assert load_tokenizer(tmp_path).eos_token_ids == ()
    write_settings(tmp_path, eos_token=token)
    assert load_tokenizer(tmp_path).eos_token_ids == (end,)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>", "unk_token": "<|im_start|>"}))
    assert sorted(load_tokenizer(tmp_path).eos_token_ids) == sorted([end, other])
    write_settings(tmp_path, eos_token="absent")  # which is not the unknown token
    assert load_tokenizer(tmp_path).eos_token_ids == (other,)


# tokenizer.model

LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "character_coverage": 0.98,
}
SYMBOLS = ["▁▁", "▁▁▁", "▁▁▁▁", "\n", "\n\n", "<start_of_turn>", "<end_of_turn>"]
GEMMA = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "add_dummy_prefix": False, "user_defined_symbols": SYMBOLS}
# Of equally likely ways to split a run of spaces, the two libraries may take different ones.
UNIGRAM = {"model_type": "unigram", "character_coverage": 0.9995, "allow_whitespace_only_pieces": False}
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "control_symbols": ["[INST]", "[/INST]"]},
    "gemma": {**LLAMA, **GEMMA},
    "bpe": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram"},
    "unigram-bytes": {**LLAMA, **UNIGRAM},
}


def test_merges_are_those_of_transformers() -> None:
    """Texts of three letters have many pieces of equal scores and lengths."""
    rng = random.Random(0)
    pieces = list(dict.fromkeys("".join(rng.choices("abc", k=rng.randint(1, 6))) for _ in range(400)))
    scores = {piece: float(rng.randint(-9, 0)) for piece in pieces if rng.random() < 0.9}
    vocab = {piece: i for i, piece in enumerate(pieces)}
    others = set(vocab) - set(scores)
    assert others and merges_of(scores) == generate_merges(vocab, list(scores.items()), others)


needs_sentencepiece = pytest.mark.skipif(
    sentencepiece is None, reason="needs sentencepiece, which makes the model: pip install sentencepiece"
)


@functools.cache
def sentencepiece_model(kind: str) -> bytes:
    assert sentencepiece is not None
    lines = [line for text in (*TEXTS, *PARTS) for line in text.split("\n")] + [" two  and   three    spaces"]
    code = [line for file in sorted(Path(__file__).parent.glob("*.py")) for line in file.read_text().splitlines()]
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((lines * 5 + code)[:4000]),
        model_writer=file,
        vocab_size=700,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **SENTENCEPIECE[kind],
    )
    return file.getvalue()


def write_model(path: Path, kind: str) -> Any:
    assert sentencepiece is not None
    (path / "tokenizer.model").write_bytes(sentencepiece_model(kind))
    (path / "config.json").write_text(json.dumps({"model_type": kind}))
    return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(kind))


@needs_sentencepiece
@pytest.mark.parametrize("legacy", [None, True, False])
@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_a_model_encodes_as_sentencepiece(tmp_path: Path, kind: str, legacy: bool | None) -> None:
    expected = write_model(tmp_path, kind)
    if legacy is not None:
        write_settings(tmp_path, kind, tokenizer_class="LlamaTokenizer", legacy=legacy)
    tokenizer = load_tokenizer(tmp_path)
    found = [tokenizer.encode(text, add_special_tokens=False) for text in strings()]
    assert found == [expected.encode(text) for text in strings()]
    assert [tokenizer.encode(text) for text in strings()] == [[expected.bos_id(), *token_ids] for token_ids in found]
    assert tokenizer.eos_token_ids == (expected.eos_id(),) and len(tokenizer.hf) == expected.get_piece_size()
    if SENTENCEPIECE[kind].get("byte_fallback"):  # else it has a text for unknown ones
        assert [tokenizer.decode(token_ids) for token_ids in found] == [expected.decode(ids) for ids in found]


@needs_sentencepiece
def test_text_behind_a_special_token_of_a_model(tmp_path: Path) -> None:
    """Llama 2 has a space there, as at the beginning of a text; newer models do not."""
    expected = write_model(tmp_path, "mistral")
    begin, words = expected.bos_id(), expected.encode("the fox")
    bare = load_tokenizer(tmp_path)
    assert bare.encode("<s>the fox", add_special_tokens=False) == [begin, *words]
    write_settings(tmp_path, legacy=False, add_bos_token=False, add_eos_token=True)
    newer = load_tokenizer(tmp_path)
    inst, end = newer.hf.convert_tokens_to_ids(["[INST]", "</s>"])
    assert newer.encode("[INST] the fox") == [inst, *words, end]
    assert newer.encode("[INST]the fox")[1:] != [*words, end]
    assert newer.encode("the fox") == [*words, end]
    write_settings(tmp_path, add_prefix_space=False)
    assert load_tokenizer(tmp_path).encode(" the fox") == [begin, *words]


@needs_sentencepiece
@pytest.mark.parametrize("file", ["tokenizer_config.json", "added_tokens.json"])
@pytest.mark.parametrize("kind", ["llama", "unigram"])
def test_tokens_that_were_added_to_a_model(tmp_path: Path, kind: str, file: str) -> None:
    """As checkpoints for chats have them, perhaps behind a gap, and in place of one that is not used."""
    expected = write_model(tmp_path, kind)
    size = expected.get_piece_size()
    added = {"<|im_start|>": size, "<|im_end|>": size + 3, "<|begin|>": expected.bos_id()}
    settings: dict[str, Any] = {"eos_token": "<|im_end|>", "bos_token": "<|begin|>", "chat_template": CHAT_TEMPLATE}
    if file == "added_tokens.json":
        (tmp_path / file).write_text(json.dumps(added))
    else:
        settings["added_tokens_decoder"] = {
            str(token_id): {"content": text, "special": True} for text, token_id in added.items()
        }
    write_settings(tmp_path, **settings)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.hf.convert_tokens_to_ids(list(added)) == list(added.values())
    assert tokenizer.eos_token_ids == (size + 3,)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    token_ids = tokenizer.encode(prompt)
    assert token_ids[:2] == [expected.bos_id(), size] and size + 3 in token_ids
    assert "<|im_end" not in tokenizer.decode(token_ids, skip_special_tokens=True)


@needs_sentencepiece
def test_a_tokenizer_json_comes_before_a_model(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    word_level().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("the fox") == [1, 3, 4, 2]


def test_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    for content in (b"IQ== 0\nIg== 1\n", b"", b"\xff" * 100):  # the first is as tiktoken has it
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(
            CheckpointError, match=r"tokenizer.model is not a SentencePiece model: add a tokenizer.json"
        ):
            load_tokenizer(tmp_path)
