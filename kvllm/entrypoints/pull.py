"""Download a model from a hub.

    kvllm pull Qwen/Qwen3-0.6B
    kvllm pull Qwen/Qwen3-0.6B --revision main
    kvllm pull Qwen/Qwen3-0.6B-GGUF:Q8_0
    kvllm pull --lora ORG/NAME

Only the files that are read come: config, tokenizer and weights, each once. They lie in the cache of huggingface_hub,
which HF_HOME moves; other commands find them by the same id. A gated model needs a token in HF_TOKEN.
"""

from __future__ import annotations

import argparse

from kvllm.engine_args import EngineArgs
from kvllm.entrypoints.model_argument import add_revision_argument
from kvllm.errors import ConfigError
from kvllm.files.hub import hub_id
from kvllm.lora.files import fetch_adapter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="ID", help="ORG/NAME, or ORG/NAME:QUANTIZATION")
    parser.add_argument("--lora", action="store_true", help="it is an adapter")
    add_revision_argument(parser)


def run(args: argparse.Namespace) -> None:
    if args.lora and (asked := hub_id(args.model)):
        print(fetch_adapter(asked))
        return
    model = EngineArgs(args.model, revision=args.revision)
    if model.snapshot is None:
        what = "exists here already" if model.path.exists() else "is neither a directory nor the id of a model"
        raise ConfigError(f"{args.model} {what}: give an id, ORG/NAME or ORG/NAME:QUANTIZATION")
    _ = model.model_config  # which checks that the model can be run
    model.fetch_weights()
    print(model.path)
