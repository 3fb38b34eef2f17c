"""GGUF files as such: damaged and hostile ones, and the numbers of every type."""

from __future__ import annotations

import os
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from kvllm.errors import CheckpointError, ConfigError
from kvllm.files.gguf.checkpoint import GGUFCheckpoint
from kvllm.files.gguf.tensors import TYPES
from kvllm.models.config import load_model_config
from kvllm.tokenizer import load_tokenizer
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.gguf_files import write_gguf

HUGE = (0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with every kind of value, and a few layers."""
    folder = tmp_path_factory.mktemp("small")
    model = make_checkpoint(folder / "model", "qwen3", head_dim=16, vocab_size=8, num_hidden_layers=1)

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(["a", "b", "ab", "<|im_end|>", "c", "d", "e", "f"])
        writer.add_token_types([1, 1, 1, 3, 1, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_add_bos_token(False)
        writer.add_chat_template([{"name": "default", "template": "{{ x }}"}, {"name": "tools", "template": "y"}])
        writer.add_float64("general.some", 0.5)

    write_gguf(folder / "small.gguf", model, Type.Q8_0, change=change)
    return (folder / "small.gguf").read_bytes()


def read_all(file: Path) -> None:
    """All that loading a model does with a file, but for the product of weights and tokens."""
    load_model_config(file)
    checkpoint = GGUFCheckpoint(file)
    with checkpoint.open_tensors() as tensors:
        for tensor in tensors.values():
            tensor.read()
    load_tokenizer(file)


def test_the_file_that_is_damaged_below_is_whole(tmp_path: Path, small: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(small)
    read_all(file)
    assert load_tokenizer(file).encode("abc") == [2, 4]


def mutated(data: bytes, generator: random.Random) -> bytes:
    """Some bytes of the header changed, a number that is absurd, a piece taken out or doubled, or the end cut."""
    header = data.index(b"output_norm.weight") + 200
    changed = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 5))):
        at = generator.randrange(min(header, len(changed)))
        kind = generator.randrange(6)
        if kind < 2:
            changed[at] = generator.randrange(256)
        elif kind == 2:
            struct.pack_into("<Q", changed, at, generator.choice(HUGE))
        elif kind == 3:
            struct.pack_into("<I", changed, at, generator.choice(HUGE) & 0xFFFFFFFF)
        elif kind == 4:
            piece = changed[at : at + generator.randrange(40)]
            changed[at : at + generator.choice((0, len(piece)))] = piece * generator.randrange(3)
        else:
            del changed[generator.randrange(len(changed)) :]
            break
    return bytes(changed)


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.long)])  # the last take 20 seconds
def test_damaged_files_are_refused_and_take_nothing(tmp_path: Path, small: bytes, count: int) -> None:
    """Each is read, or refused with an error of ours, at once and in little memory."""
    generator, file, refused = random.Random(0), tmp_path / "model.gguf", 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        file.write_bytes(mutated(small, generator))
        started = time.perf_counter()
        try:
            read_all(file)
        except (CheckpointError, ConfigError) as error:
            refused += 1
            assert str(file) in str(error), number
        assert time.perf_counter() - started < 5, number
    assert count / 2 < refused < count
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def put(form: str, at: int, value: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        struct.pack_into(form, changed, at, value)
        return bytes(changed)

    return change


def in_tensor(name: bytes, offset: int, value: int) -> Callable[[bytes], bytes]:
    """Another number of 64 bits after a tensor's name: its dimensions, then type and place."""
    return lambda data: put("<Q", data.index(name) + len(name) + 4 + offset, value)(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "fewer bytes than a header"),
        (lambda data: data[:20], "fewer bytes than a header"),
        (lambda data: b"PK" + data[2:], "does not begin with GGUF"),
        (put("<I", 4, 1), "is a GGUF file of version 1; kvllm reads version 2 and 3"),
        (put(">I", 4, 3), "is a GGUF file of big-endian; kvllm reads"),
        (put("<Q", 8, 1 << 60), "tensors are more than it has room for"),
        (put("<Q", 16, 1 << 60), "values and .* tensors are more than it has room for"),
        (put("<Q", 24, 1 << 62), "a text of 4,611,686,018,427,387,904 bytes is longer than the file"),
        (lambda data: data[:-1], "lies at .* bytes of data, in units of 32"),
        (lambda data: data[:300], "not a complete GGUF file"),
        (in_tensor(b"blk.0.attn_q.weight", 0, 1 << 63), "has the shape"),
        (in_tensor(b"blk.0.attn_q.weight", 8, 0), r"has the shape \(0, 64\)"),
        (in_tensor(b"blk.0.attn_q.weight", 0, 65), "rows of 65 numbers, no multiple of 32 as Q8_0 has"),
        (in_tensor(b"blk.0.attn_q.weight", 20, 1 << 40), "lies at 1,099,511,627,776 "),
        (in_tensor(b"blk.0.attn_q.weight", 20, 8), "in units of 32"),
        (
            in_tensor(b"blk.0.attn_q.weight", 16, 99),
            "'blk.0.attn_q.weight' has a type of number 99, which is not known",
        ),
        (lambda data: data.replace(b"attn_k.weight", b"attn_q.weight"), "has the tensor 'blk.0.attn_q.weight' twice"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, small: bytes, change: Callable[[bytes], bytes], message: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(change(small))
    with pytest.raises(CheckpointError, match=message) as refused:
        load_model_config(file)
    assert str(refused.value).startswith(str(file))


def test_a_header_is_read_again_after_a_write(tmp_path: Path, small: bytes) -> None:
    """Of as many bytes, at the same moment just now, or at another one long ago."""
    path, key = tmp_path / "model.gguf", b"general.architecture"
    contents = [small, small.replace(key, key[:-1] + b"x")]
    now = time.time_ns()
    for moment in (now, now, now, 1, 2, 3):
        path.write_bytes(contents[0])
        os.utime(path, ns=(moment, moment))
        assert (key.decode() in GGUFCheckpoint(path).header.metadata) == (contents[0] == small)
        contents.reverse()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="model.gguf cannot be read: .*No such file"):
        load_model_config(tmp_path / "model.gguf")
    (tmp_path / "model.bin").write_bytes(b"weights")
    with pytest.raises(CheckpointError, match="is not a directory: give .* a .gguf file, or the id"):
        load_model_config(tmp_path / "model.bin")


@pytest.mark.parametrize("name", TYPES)
def test_numbers_of_a_type(tmp_path: Path, name: str) -> None:
    """Blocks of random bytes, some rows of them, against the package's reader and dequantizer of whole tensors."""
    kind = Type[name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 256, (50, 512 // block * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("matrix", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    [reference] = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(np.array(gguf.dequantize(reference.data, kind), np.float32))
    tensor = GGUFCheckpoint(tmp_path / "model.gguf").raw_tensors()["matrix"]
    assert tensor.shape == (50, 512) and tensor.type == kind
    assert torch.equal(tensor.blocks, torch.from_numpy(raw))
    for rows in (slice(None), slice(17, 33), torch.tensor([4, 49, 0])):
        torch.testing.assert_close(tensor.read(rows), expected[rows], rtol=0, atol=0, equal_nan=True)
    assert tensor.read().dtype == torch.float32 and tensor.read()[:, :32].isfinite().any()
    tensor.forget()
    torch.testing.assert_close(tensor.read(), expected, rtol=0, atol=0, equal_nan=True)
