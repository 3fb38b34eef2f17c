"""The files of published models, against what transformers made of them: see benchmarks/fetch_models.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch

from kvllm import LLM
from kvllm.files.checkpoint import open_checkpoint
from kvllm.files.gguf.checkpoint import GGUFCheckpoint
from kvllm.tokenizer import load_tokenizer
from tests.helpers.engines import greedy

ROOT = Path(__file__).parents[2]
TEXTS = (
    (ROOT / "LICENSE").read_text()[33:2900].lstrip(),
    (ROOT / "kvllm" / "llm.py").read_text(),
    "x =  2024  \n\n\n  a\tb\t\tc  '{}'",
    "中文 日本語 한글 😀👍🏽 café naïve é ½ ＡＢ ١٢٣",
    "<|im_start|>user\nhi<|im_end|>\n<start_of_turn>user\n hi<end_of_turn>\n<table><td>",
)


SMALLEST = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module", params=[SMALLEST, "gemma-3-270m"])
def pair(request: pytest.FixtureRequest, real_model: Callable[[str], Path]) -> tuple[Path, Path]:
    """The directory that transformers has written, and the file."""
    directory = real_model(request.param)
    file = directory / "model.gguf"
    if not file.is_file():
        pytest.skip(f"needs {file}, which is absent: remove {directory} and run make models")
    return directory, file


of_the_smallest = pytest.mark.parametrize(
    "pair", [SMALLEST, pytest.param("gemma-3-270m", marks=pytest.mark.long)], indirect=True, scope="module"
)


def test_tokens_of_texts(pair: tuple[Path, Path]) -> None:
    directory, file = map(load_tokenizer, pair)
    for text in TEXTS:
        token_ids = directory.encode(text)
        assert file.encode(text) == token_ids
        assert file.decode(token_ids) == directory.decode(token_ids)
    assert file.special_token_ids == directory.special_token_ids
    assert file.hf.chat_template == directory.hf.chat_template
    assert set(directory.eos_token_ids) <= set(file.eos_token_ids)


@of_the_smallest
def test_greedy_tokens(pair: tuple[Path, Path]) -> None:
    encode = load_tokenizer(pair[0]).encode
    prompts = [encode(text) for text in ("1, 2, 3, 4, 5, 6,", "def fibonacci(n):\n", TEXTS[0][:600])]
    found = []
    for path, quantization in zip(pair, (None, "dtype"), strict=True):
        llm = LLM(path, dtype="bfloat16", block_size=16, num_gpu_blocks_override=300, quantization=quantization)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy(12), use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1] and [len(token_ids) for token_ids in found[0]] == [12] * 3


@of_the_smallest
def test_weights_are_bit_for_bit_those_of_transformers(pair: tuple[Path, Path]) -> None:
    directory, file = map(open_checkpoint, pair)
    with directory.open_tensors() as theirs, file.open_tensors() as ours:
        assert set(theirs) - {"lm_head.weight"} == set(ours)
        for name, tensor in ours.items():
            assert torch.equal(tensor.read().to(torch.bfloat16), theirs[name].read()), name


@pytest.mark.long  # the package takes half a minute for the header
def test_numbers_of_each_type_are_those_of_the_package(pair: tuple[Path, Path]) -> None:
    """On the first matrix of each type."""
    ours, seen = GGUFCheckpoint(pair[1]).raw_tensors(), set()
    for tensor in gguf.GGUFReader(pair[1]).tensors:
        if tensor.tensor_type in seen or tensor.name == "token_embd.weight":
            continue
        seen.add(tensor.tensor_type)
        expected = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(ours[tensor.name].read(), expected)
    assert len(seen) >= 2
