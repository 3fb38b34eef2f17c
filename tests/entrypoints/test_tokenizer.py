"""Tokenizers: loading, chat templates, incremental decoding, stop strings."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvllm.errors import CheckpointError, RequestError
from kvllm.files.checkpoint import open_checkpoint
from kvllm.tokenizer import IncrementalDecoder, StopChecker, Tokenizer, find_tokenizer, load_tokenizer
from tests.helpers.examples import examples
from tests.helpers.tokenizers import KINDS, byte_level, sentencepiece_like

BYTE_LEVEL = {"Qwen3": "tokenizers/Qwen3", "Llama-3.2": "tokenizers/Llama-3.2", "gpt2": "tokenizers/gpt2"}
REAL = {**BYTE_LEVEL, "stories260K": "models/stories260K-fp32"}
TEXT = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("abc .,'\n"),
        st.sampled_from("中文字あア한글"),
        st.sampled_from("😀👨‍👩‍👧🇩🇪👍🏽é\u0301\ufffd"),
    )
)


@functools.cache
def loaded(path: Path) -> Tokenizer:
    return load_tokenizer(path)


def get_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """One that is made here, or that of a real checkpoint where it is at hand."""
    if request.param == "sentencepiece":
        return sentencepiece_like()
    if request.param in KINDS:
        return byte_level(request.param)
    path = request.getfixturevalue("shared_dir") / "data" / REAL[request.param]
    if not path.is_dir():
        pytest.skip(f"needs the tokenizer in {path}, which is absent")
    return loaded(path)


# Tokenizers of byte-level BPE, and these and SentencePiece's.
tokenizer = pytest.fixture(params=[*KINDS, *BYTE_LEVEL], name="tokenizer")(get_tokenizer)
any_tokenizer = pytest.fixture(params=["sentencepiece", *KINDS, *REAL], name="any_tokenizer")(get_tokenizer)


def pieces_of(
    tokenizer: Tokenizer,
    token_ids: list[int],
    skip_special_tokens: bool,
    step: int = 1,
    prompt_token_ids: Sequence[int] = (),
) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens, prompt_token_ids)
    pieces = [decoder.push(token_ids[i : i + step]) for i in range(0, len(token_ids), step)]
    return [*pieces, decoder.finish()]


def test_loading_says_what_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match="not a directory"):
        load_tokenizer(tmp_path / "absent")
    assert find_tokenizer(open_checkpoint(tmp_path)) is None
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*token ids"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_its_vocabulary_is_not_loaded(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    (tmp_path / "vocab.json").write_text("{}")  # and no merges.txt
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("broken", ["", "{", "{}"])
def test_a_broken_tokenizer_is_reported(tmp_path, broken):
    (tmp_path / "tokenizer.json").write_text(broken)
    assert open_checkpoint(tmp_path).has_tokenizer()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_code_of_a_checkpoint_is_not_run(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    config = {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": ["custom.Custom", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_special_tokens_are_added_as_the_checkpoint_wants():
    bos = byte_level("bos")
    assert bos.encode("Hi") == [bos.hf.bos_token_id, *bos.encode("Hi", add_special_tokens=False)]
    chat = byte_level("chat")
    assert chat.encode("Hi") == chat.encode("Hi", add_special_tokens=False)


def test_decoding_does_not_clean_up(tokenizer):
    text = "Ready , world . I 'm here !"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_decoding_does_not_clean_up_words():
    backend = Backend(models.WordLevel({"I": 0, "'m": 1, ".": 2}, unk_token="I"))
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True))
    assert tokenizer.hf.decode([0, 1, 2]) == "I'm."
    assert tokenizer.decode([0, 1, 2]) == "I 'm ."


def test_ids_that_the_tokenizer_does_not_know_have_no_text(tokenizer):
    assert tokenizer.decode([len(tokenizer.hf) + 7]) == ""


def test_the_text_of_one_token_is_what_it_adds_to_a_text(any_tokenizer):
    """A Llama-style decoder drops the first space of a text, so a token's text is not its decoding."""
    context = any_tokenizer.encode("b", add_special_tokens=False)[-1]
    before = any_tokenizer.decode([context])
    for token_id in [*range(300), len(any_tokenizer.hf) + 7]:
        assert before + any_tokenizer.decode_token(token_id) == any_tokenizer.decode([context, token_id])


def test_the_bytes_of_tokens_add_up_to_a_text(any_tokenizer):
    """Those of parts of characters, too, whose names differ."""
    text = "b中文字 naïve 👨‍👩‍👧 \ufffd x"
    token_ids = any_tokenizer.encode(text, add_special_tokens=False)
    own = b"".join(any_tokenizer.token_bytes(token_id) for token_id in token_ids)
    assert own.decode().removeprefix(" ") == any_tokenizer.decode(token_ids)  # which Llama's way puts in front
    known = [token_id for token_id in range(len(any_tokenizer.hf)) if any_tokenizer.token_bytes(token_id)]
    parts = [i for i in known if any_tokenizer.decode_token(i) != any_tokenizer.token_name(i)]
    assert len(parts) >= 128 and len({any_tokenizer.token_name(i) for i in parts}) == len(parts)
    for token_id in parts:
        own = "".join(f"\\x{byte:02x}" for byte in any_tokenizer.token_bytes(token_id))
        assert any_tokenizer.token_name(token_id) == f"bytes:{own}"


def test_the_bytes_of_a_special_token_a_space_and_a_part_of_a_character(tokenizer):
    end = str(tokenizer.hf.eos_token)
    for token, expected in ((end, end.encode()), ("Ġ", b" "), ("é", b"\xe9")):
        assert tokenizer.token_bytes(tokenizer.hf.convert_tokens_to_ids(token)) == expected
    assert tokenizer.token_bytes(len(tokenizer.hf) + 7) == b""


@pytest.mark.parametrize("prompt", [5, None, b"bytes", ["text"], "lone \ud800 surrogate"])
def test_a_prompt_that_is_no_text_is_refused(prompt):
    with pytest.raises(RequestError, match="prompt"):
        byte_level("bos").encode(prompt)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def test_chat_template():
    chat = byte_level("chat")
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    assert chat.apply_chat_template(MESSAGES) == turns + "<|im_start|>assistant\n"
    assert chat.apply_chat_template(MESSAGES, add_generation_prompt=False) == turns
    no_thinking = chat.apply_chat_template(MESSAGES, enable_thinking=False)
    assert no_thinking == turns + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    expected = chat.hf.apply_chat_template(MESSAGES, add_generation_prompt=True, enable_thinking=False)["input_ids"]
    assert chat.encode(no_thinking, add_special_tokens=False) == expected


def test_a_checkpoint_without_chat_template():
    plain = byte_level("plain")
    with pytest.raises(RequestError, match="no chat template"):
        plain.apply_chat_template(MESSAGES)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert plain.apply_chat_template(MESSAGES, chat_template=template) == "system: Be brief.\nuser: 2+2?\n"


@pytest.mark.parametrize(
    "messages",
    [
        *("hi", None, [], {"role": "user", "content": "x"}, ["hi"], [MESSAGES]),
        *([{"content": "x"}], [{"role": 5, "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 5}]),
    ],
)
def test_malformed_messages_are_refused(messages):
    with pytest.raises(RequestError, match="messages"):
        byte_level("chat").apply_chat_template(messages)


def test_text_grows_into_the_decoded_text(tokenizer):
    @settings(max_examples=examples(150))
    @given(text=TEXT, skip=st.booleans(), step=st.integers(1, 3))
    def check(text, skip, step):
        token_ids = tokenizer.encode(text)
        pieces = pieces_of(tokenizer, token_ids, skip, step)
        assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)

    check()


def test_any_tokens_grow_into_their_decoded_text(tokenizer):
    """Tokens as a random model gives them: halves of characters, invalid bytes, special and unknown tokens."""
    single_bytes = tokenizer.hf.convert_tokens_to_ids(list(bytes_to_unicode().values()))
    special = sorted(tokenizer.special_token_ids)[:3]
    token_id = st.one_of(st.sampled_from(single_bytes), st.sampled_from(special), st.integers(0, len(tokenizer.hf) + 5))

    @settings(max_examples=examples(200))
    @given(token_ids=st.lists(token_id, max_size=60), skip=st.booleans(), step=st.integers(1, 3))
    def check(token_ids, skip, step):
        expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert "".join(pieces_of(tokenizer, token_ids, skip, step)) == expected

    check()


@pytest.mark.parametrize("count", range(10, 24))
def test_a_character_after_many_invalid_bytes(count):
    tokenizer = byte_level("chat")
    symbols = bytes_to_unicode()
    token_ids = tokenizer.hf.convert_tokens_to_ids([symbols[byte] for byte in b"\x80" * count + "中".encode()])
    assert "".join(pieces_of(tokenizer, token_ids, True)) == "\ufffd" * count + "中"


def test_special_tokens_that_are_skipped_are_those_without_text(tokenizer):
    without_text = {i for i in range(len(tokenizer.hf)) if tokenizer.decode([i], skip_special_tokens=True) == ""}
    assert tokenizer.special_token_ids == without_text


@settings(max_examples=examples(300))
@example(words=["b", *"中" * 12], skip=True, step=3)
@given(
    words=st.lists(st.sampled_from(["▁", "▁a", "a", "b", "▁the", "字", "中", "😀", "</s>", "\n"]), max_size=40),
    skip=st.booleans(),
    step=st.integers(1, 3),
)
def test_marked_spaces_and_byte_fallback(words, skip, step):
    tokenizer = sentencepiece_like()
    vocab = tokenizer.hf.get_vocab()
    names = [[word] if word in vocab else [f"<0x{byte:02X}>" for byte in word.encode()] for word in words]
    token_ids = [vocab[name] for group in names for name in group]
    expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces_of(tokenizer, token_ids, skip, step)) == expected


# Text after a prompt


def text_behind(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """The text after the whole characters of the prompt's text, in the text of both."""
    heads = (tokenizer.decode(prompt[: len(prompt) - cut], skip_special_tokens=skip) for cut in range(4))
    whole = next(head for head in heads if not head.endswith("\ufffd"))
    text = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    assert text.startswith(whole)
    return text[len(whole) :]


def test_the_prompts_text_and_the_pieces_are_the_text(any_tokenizer):
    """Wherever a text is cut into prompt and output: between words, and inside a character."""
    tokenizer = any_tokenizer

    @settings(max_examples=examples(150))
    @example(text="Once upon", cut=2, skip=True, step=1)
    @example(text="Once 中文", cut=4, skip=True, step=1)
    @example(text="中文字" * 5, cut=13, skip=True, step=3)
    @given(
        text=TEXT.map(lambda text: text.replace("\ufffd", "")),
        cut=st.integers(0),
        skip=st.booleans(),
        step=st.integers(1, 3),
    )
    def check(text, cut, skip, step):
        token_ids = tokenizer.encode(text)
        cut = min(cut, len(token_ids))
        prompt, output = token_ids[:cut], token_ids[cut:]
        pieces = pieces_of(tokenizer, output, skip, step, prompt)
        assert "".join(pieces) == text_behind(tokenizer, prompt, output, skip)

    check()


@pytest.mark.parametrize("end", [[], ["<s>"], ["</s>", "<s>"]], ids=str)
def test_special_tokens_at_the_end_of_a_prompt(end):
    """They have no text, so the words before and after them stay apart as in the text of all tokens."""
    tokenizer = sentencepiece_like()
    once, upon, *special = tokenizer.hf.convert_tokens_to_ids(["▁Once", "▁upon", *end])
    assert "".join(pieces_of(tokenizer, [upon], True, 1, [once, *special])) == " upon"
    assert "".join(pieces_of(tokenizer, [upon], True, 1, special)) == "upon"  # the text begins here
    both = tokenizer.decode([once, *special, upon])
    assert (
        "".join(pieces_of(tokenizer, [upon], False, 1, [once, *special]))
        == both[len(tokenizer.decode([once, *special])) :]
    )


def test_a_prompts_broken_character_that_stays_broken_belongs_to_the_prompt(any_tokenizer):
    symbols = bytes_to_unicode()
    by_name = any_tokenizer.hf.get_vocab()
    byte_names = [f"<0x{byte:02X}>" if "<0x00>" in by_name else symbols[byte] for byte in "中".encode()]
    half = any_tokenizer.hf.convert_tokens_to_ids(byte_names[:-1])
    assert "\ufffd" in any_tokenizer.decode(half)
    (letter,) = any_tokenizer.encode("a", add_special_tokens=False)[-1:]
    prompt = [*any_tokenizer.encode("b"), *half]
    expected = any_tokenizer.decode([*prompt, letter])[len(any_tokenizer.decode(prompt)) :]
    assert "".join(pieces_of(any_tokenizer, [letter], False, 1, prompt)) == expected
    assert "".join(pieces_of(any_tokenizer, [], False, 1, prompt)) == ""


class CountingTokenizer(Tokenizer):
    """Counts the tokens that are decoded."""

    num_decoded = 0

    def decode(self, token_ids, skip_special_tokens=False):
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize("kind", ["invalid", "split", "special", "unknown"])
def test_the_cost_of_a_token_does_not_grow(kind):
    """Runs that models fall into: none of them may be decoded again and again from its start."""
    tokenizer = CountingTokenizer(byte_level("chat").hf)
    symbols = bytes_to_unicode()
    invalid, lead, continued = tokenizer.hf.convert_tokens_to_ids([symbols[0x80], symbols[0xE4], symbols[0xB8]])
    runs = {
        "invalid": [invalid] * 1000,
        "split": [invalid] + [lead, continued] * 500,
        "special": [lead] + [tokenizer.hf.eos_token_id] * 1000,
        "unknown": [len(tokenizer.hf)] * 1000,
    }
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push([token_id]) for token_id in runs[kind]]
    assert tokenizer.num_decoded <= 40 * len(runs[kind])
    assert "".join([*pieces, decoder.finish()]) == tokenizer.decode(runs[kind], skip_special_tokens=True)


def stopped(pieces: list[str], stop: list[str], include: bool = False, armed_from: int = 0) -> tuple[str, str | None]:
    checker = StopChecker(stop, include)
    text = ""
    for index, piece in enumerate(pieces):
        final, found = checker.push(piece, armed=index >= armed_from)
        text += final
        if found is not None:
            return text, found
    return text + checker.finish(), None


def test_stop_strings_may_span_pieces():
    assert stopped(["Ready", " wor", "ld", "!"], ["world"]) == ("Ready ", "world")
    assert stopped(["Ready", " wor", "ld!"], ["world"], include=True) == ("Ready world", "world")
    assert stopped(["Ready", " wor", "k"], ["world"]) == ("Ready work", None)
    assert stopped(["abc"], []) == ("abc", None)
    assert stopped(["a\n", "\nb"], ["\n\n"]) == ("a", "\n\n")


def test_text_that_may_become_a_stop_string_is_held_back():
    checker = StopChecker(["</end>", "<x>"])
    assert checker.push("text <") == ("text ", None)
    assert checker.push("/en") == ("", None)
    assert checker.push("ough <") == ("</enough ", None)
    assert checker.finish() == "<"


def test_stop_strings_complete_before_they_are_armed_do_not_count():
    assert stopped(["a b", " c b"], ["b"], armed_from=1) == ("a b c ", "b")
    assert stopped(["en", "d", "end"], ["end"], armed_from=2) == ("end", "end")
    assert stopped(["e", "nd"], ["end"], armed_from=1) == ("", "end")
    assert stopped(["ab", "x"], ["b", "abc"], armed_from=1) == ("abx", None)


@settings(max_examples=examples(500))
@given(
    text=st.text("ab", max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_borders_of_pieces_do_not_matter(text, cuts, stop, include):
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(borders)]
    found, expected = None, text
    for end in range(len(text) + 1):
        matches = [each for each in stop if text[:end].endswith(each)]
        if matches:
            found = max(matches, key=len)
            expected = text[:end] if include else text[: end - len(found)]
            break
    assert stopped(pieces, stop, include) == (expected, found)
