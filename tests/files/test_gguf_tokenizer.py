"""Tokenizers from the metadata of GGUF files, against those that the metadata was made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, trainers
from transformers import GemmaTokenizer, PreTrainedTokenizerBase
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from kvllm.errors import CheckpointError
from kvllm.files.checkpoint import open_checkpoint
from kvllm.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from tests.helpers.tokenizers import CHAT_TEMPLATE, TEXTS, byte_level

SPLIT = (
    *(
        "def f(x):\n    return x**2  # 1234 56789\r\n\n\n\tend",
        "I'LL don't WE'VE 3½ x², $12.50/month!!! ...  ",
        "中文字 日本語。ABC1",
    ),
    *(
        "<|im_start|>user\n hi <|im_end|>\n<think>",
        " a",
        "  ",
        "",
        "e\u0301 é \u00a0 \u3000 end",
        "HTTPServer/camelCase\n/path",
    ),
)


def write(path: Path, change: Callable[[gguf.GGUFWriter], None], architecture: str = "llama") -> Path:
    """A file without weights."""
    writer = gguf.GGUFWriter(path, architecture)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_metadata(theirs: Tokenizer, pre: str) -> Callable[[gguf.GGUFWriter], None]:
    """As llama.cpp's converter writes it."""
    hf: PreTrainedTokenizerBase = theirs.hf
    added = hf.added_tokens_decoder
    model = json.loads(hf.backend_tokenizer.to_str())["model"]
    tokens = [hf.convert_ids_to_tokens(i) for i in range(len(hf))]

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        kinds = [
            gguf.TokenType.NORMAL
            if i not in added
            else gguf.TokenType.CONTROL
            if added[i].special
            else gguf.TokenType.USER_DEFINED
            for i in range(len(hf))
        ]
        writer.add_token_types(kinds)
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
        for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
            if (token := getattr(hf, f"{name}_token")) is not None:
                add(hf.convert_tokens_to_ids(token))
        if hf.chat_template is not None:
            writer.add_chat_template(hf.chat_template)

    return change


def assert_same(ours: Tokenizer, theirs: Tokenizer, texts: tuple[str, ...]) -> None:
    for text in texts:
        token_ids = theirs.encode(text)
        assert ours.encode(text) == token_ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(token_ids) == theirs.decode(token_ids)
        assert ours.decode(token_ids, skip_special_tokens=True) == theirs.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_byte_level(tmp_path: Path, kind: str) -> None:
    theirs = byte_level(kind)
    ours = load_tokenizer(write(tmp_path / "model.gguf", byte_level_metadata(theirs, "gpt-2")))
    ours.hf.backend_tokenizer.pre_tokenizer = theirs.hf.backend_tokenizer.pre_tokenizer  # the helper has its own
    assert_same(ours, theirs, TEXTS + SPLIT)
    assert ours.special_token_ids == theirs.special_token_ids and ours.added_token_ids == theirs.added_token_ids
    assert set(theirs.eos_token_ids) <= set(ours.eos_token_ids)
    assert ours.hf.chat_template == theirs.hf.chat_template


def test_chats_and_the_tokens_that_end_a_turn(tmp_path: Path) -> None:
    theirs = byte_level("chat")
    ours = load_tokenizer(write(tmp_path / "model.gguf", byte_level_metadata(theirs, "qwen2")))
    messages = [{"role": "user", "content": "hi"}]
    assert ours.hf.chat_template == CHAT_TEMPLATE
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    ends = [ours.decode([token_id]) for token_id in ours.eos_token_ids]
    assert sorted(ends) == ["<|end|>", "<|im_end|>"]


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    backend: Backend = tokenizer.hf.backend_tokenizer
    assert backend.pre_tokenizer is not None
    return [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["x", " =", " ", " 2024", "!", "\n", "\n", "I", "'", "LL", " don", "'t"]),
        ("smollm", ["x", " =", "  ", "2", "0", "2", "4", "!", "\n", "\n", "I", "'", "LL", " don", "'t"]),
        ("qwen2", ["x", " =", " ", " ", "2", "0", "2", "4", "!\n\n", "I", "'LL", " don", "'t"]),
        ("llama-bpe", ["x", " =", " ", " ", "202", "4", "!\n\n", "I", "'LL", " don", "'t"]),
        ("tekken", ["x", " =", " ", " ", "2", "0", "2", "4", "!\n\n", "I", "'LL", " don", "'t"]),
        ("qwen35", ["x", " =", " ", " ", "2", "0", "2", "4", "!\n\n", "I", "'LL", " don", "'t"]),
        ("glm4", ["x", " =", " ", " ", "202", "4", "!\n\n", "I", "'LL", " don", "'t"]),
        ("gpt-4o", ["x", " =", " ", " ", "202", "4", "!\n\n", "I'LL", " don't"]),
        ("kimi-k2", ["x", " =", " ", " ", "202", "4", "!\n\n", "I'LL", " don't"]),
        ("deepseek-v3", ["x", " =", "  ", "202", "4", "!\n\n", "I", "'LL", " don", "'t"]),
    ],
)
def test_words_of_each_way_to_split(tmp_path: Path, pre: str, expected: list[str]) -> None:
    ours = load_tokenizer(write(tmp_path / "model.gguf", byte_level_metadata(byte_level("chat"), pre)))
    assert words(ours, "x =  2024!\n\nI'LL don't") == expected


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("kimi-k2", ["中文字", " ", "日本語", "の", "ABC", "123", "4", " $", "x", "\té"]),
        ("deepseek-v3", ["中文字", " ", "日本語の", "ABC", "123", "4", " $", "x", "\té"]),
    ],
)
def test_words_of_chinese(tmp_path: Path, pre: str, expected: list[str]) -> None:
    ours = load_tokenizer(write(tmp_path / "model.gguf", byte_level_metadata(byte_level("chat"), pre)))
    assert words(ours, "中文字 日本語のABC1234 $x\té") == expected


def test_words_of_qwen_3_5_keep_their_marks(tmp_path: Path) -> None:
    """Against transformers' own tokenizer of the family."""
    ours = load_tokenizer(write(tmp_path / "model.gguf", byte_level_metadata(byte_level("chat"), "qwen35")))
    theirs: Backend = Qwen3_5Tokenizer().backend_tokenizer
    for text in (*TEXTS, *SPLIT, "नमस्ते दुनिया, e\u0301a ِب"):
        assert theirs.normalizer is not None and theirs.pre_tokenizer is not None
        expected = theirs.pre_tokenizer.pre_tokenize_str(theirs.normalizer.normalize_str(text))
        backend: Backend = ours.hf.backend_tokenizer
        assert backend.normalizer is not None and backend.pre_tokenizer is not None
        assert backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text)) == expected, text
    assert words(ours, "नमस्ते दुनिया") == ["नमस्ते", " दुनिया"]


SYMBOLS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|tool_response>"]


def gemma4_metadata(theirs: GemmaTokenizer) -> Callable[[gguf.GGUFWriter], None]:
    """As Gemma4Model.set_vocab of llama.cpp's converter."""
    tokens = theirs.convert_ids_to_tokens(list(range(len(theirs))))
    merges = json.loads(theirs.backend_tokenizer.to_str())["model"]["merges"]

    def kind(token: str) -> gguf.TokenType:
        if token == "<|tool_response>":
            return gguf.TokenType.USER_DEFINED
        if token == "<unk>":
            return gguf.TokenType.UNKNOWN
        is_byte = token.startswith("<0x")
        return gguf.TokenType.CONTROL if token in SYMBOLS else gguf.TokenType(6 if is_byte else 1)

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_scores([-1000.0] * len(tokens))
        writer.add_token_types([kind(token) for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(3)
        writer.add_add_space_prefix(False)

    return change


def test_gemma_4(tmp_path: Path) -> None:
    """Against transformers' tokenizer of Gemma, with merges learned from some texts."""
    learned = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    learned.normalizer = normalizers.Replace(" ", "▁")
    symbols = [*SYMBOLS, *(f"<0x{byte:02X}>" for byte in range(256))]
    learned.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=500, special_tokens=symbols))
    model = json.loads(learned.to_str())["model"]
    theirs = GemmaTokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    theirs.add_special_tokens({"additional_special_tokens": SYMBOLS[5:]})
    ours = load_tokenizer(write(tmp_path / "model.gguf", gemma4_metadata(theirs), "gemma4"))
    for text in (*TEXTS, *SPLIT, "a  b   c", "<|turn>user\n x<turn|>", "  ünïcødé ½ 🙂"):
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.encode(text) == [2, *expected]
        assert ours.decode(expected) == theirs.decode(expected)
    assert sorted(ours.eos_token_ids) == [1, 6, 7]


def test_a_token_before_texts_of_llama_3_and_words_that_are_tokens(tmp_path: Path) -> None:
    """Its vocabulary has words that no merges make. What the file says about the token counts more."""
    metadata = byte_level_metadata(byte_level("bos"), "llama-bpe")
    ours = load_tokenizer(write(tmp_path / "model.gguf", metadata))
    begin = byte_level("bos").encode("")
    assert len(begin) == 1 and ours.encode("the dog")[:1] == begin

    def without(writer: gguf.GGUFWriter) -> None:
        metadata(writer)
        writer.add_add_bos_token(False)

    assert load_tokenizer(write(tmp_path / "other.gguf", without)).encode("the dog") == ours.encode("the dog")[1:]


def train(folder: Path, prefix: bool, symbols: list[str]) -> sentencepiece.SentencePieceProcessor:
    (folder / "text").write_text("\n".join(TEXTS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "model"),
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=symbols,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "model.model"))


def sentencepiece_metadata(
    pieces: sentencepiece.SentencePieceProcessor, prefix: bool, symbols: list[str]
) -> Callable[[gguf.GGUFWriter], None]:
    """As llama.cpp's converter writes it, with the spaces of symbols as they are."""
    names = [pieces.id_to_piece(i) for i in range(pieces.vocab_size())]

    def kind(i: int) -> gguf.TokenType:
        if names[i] in symbols:
            return gguf.TokenType.USER_DEFINED
        if pieces.is_control(i):
            return gguf.TokenType.CONTROL
        if pieces.is_unknown(i):
            return gguf.TokenType.UNKNOWN
        return gguf.TokenType.BYTE if pieces.is_byte(i) else gguf.TokenType.NORMAL

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([name.replace("▁", " ") if name in symbols else name for name in names])
        writer.add_token_scores([pieces.get_score(i) for i in range(len(names))])
        writer.add_token_types([kind(i) for i in range(len(names))])
        writer.add_bos_token_id(pieces.bos_id())
        writer.add_eos_token_id(pieces.eos_id())
        writer.add_unk_token_id(pieces.unk_id())
        writer.add_add_space_prefix(prefix)

    return change


@pytest.mark.parametrize(
    ("prefix", "symbols"), [(True, []), (False, ["<think>", "▁▁", "▁▁▁▁"])], ids=["llama", "gemma"]
)
def test_sentencepiece(tmp_path: Path, prefix: bool, symbols: list[str]) -> None:
    """Against the library itself. Symbols have runs of spaces, as Gemma's, and the longest one counts."""
    pieces = train(tmp_path, prefix, symbols)
    ours = load_tokenizer(write(tmp_path / "model.gguf", sentencepiece_metadata(pieces, prefix, symbols)))
    for text in (*TEXTS, "a  b   c       d", "x<think> y", " leading", "ünïcødé ½ 🙂", "  <think>  <think>"):
        assert ours.encode(text) == [pieces.bos_id(), *pieces.encode(text)], text
        assert ours.decode(pieces.encode(text)) == text
    assert ours.eos_token_ids == (pieces.eos_id(),)
    assert all((pieces.piece_to_id(symbol) in pieces.encode("      <think>")) for symbol in symbols)


def test_phi_3_strips_spaces_after_special_tokens(tmp_path: Path) -> None:
    symbols = ["<think>"]
    metadata = sentencepiece_metadata(train(tmp_path, True, symbols), True, symbols)
    files = [write(tmp_path / f"{name}.gguf", metadata, name) for name in ("llama", "phi3")]
    plain, phi3 = (load_tokenizer(file).encode("<think>\n\ndog") for file in files)
    assert len(phi3) < len(plain) and phi3[:2] == plain[:2]


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    metadata = byte_level_metadata(byte_level("chat"), "deepseek-llm")
    with pytest.raises(CheckpointError, match=r"way to split texts 'deepseek-llm' \(tokenizer.ggml.pre\): kvllm knows"):
        load_tokenizer(write(tmp_path / "model.gguf", metadata))

    def unigram(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list(["a"])
        writer.add_token_types([1])

    with pytest.raises(CheckpointError, match=r"unsupported tokenizer 't5' \(tokenizer.ggml.model\): kvllm reads gpt2"):
        load_tokenizer(write(tmp_path / "unigram.gguf", unigram))


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", lambda writer: None)
    assert find_tokenizer(open_checkpoint(path)) is None
    with pytest.raises(CheckpointError, match="model.gguf has no tokenizer: give prompts as token ids, or tokenizer="):
        load_tokenizer(path)
