"""Remove a model that was downloaded from a hub.

    kvllm rm Qwen/Qwen3-0.6B                 all that is there of it
    kvllm rm Qwen/Qwen3-0.6B --revision v1   one branch, tag or commit
    kvllm rm Qwen/Qwen3-0.6B-GGUF:Q8_0       one quantization

Files that another commit shares stay.
"""

from __future__ import annotations

import argparse

from kvllm.errors import ConfigError
from kvllm.files.hub import hub_id
from kvllm.files.hub_cache import remove
from kvllm.files.hub_files import gib


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="ID", help="ORG/NAME, or ORG/NAME:QUANTIZATION, as kvllm list shows it")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit (default: all)")


def run(args: argparse.Namespace) -> None:
    asked = hub_id(args.model)
    if asked is None:
        raise ConfigError(f"{args.model} is no id of a downloaded model: give one that kvllm list shows")
    freed = remove(asked, args.revision)
    print(f"Removed: {args.model}, {gib(freed)}")
