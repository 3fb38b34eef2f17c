"""Continue a text with a running server.

    kvllm complete -q "The capital of France is" --max-tokens 32
    kvllm complete < prompt.txt
    kvllm complete                 asks for prompts until the end of input (Ctrl-D)

An interrupt (Ctrl-C) while the server writes ends that text alone.
"""

from __future__ import annotations

import argparse

from kvllm.entrypoints import conversation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    conversation.add_arguments(parser, "PROMPT")


def run(args: argparse.Namespace) -> None:
    from kvllm.client.connection import Connection  # its packages come with the extra `serve`

    connection = Connection(args.url, args.api_key)
    body = conversation.common_body(args, connection)

    def complete(prompt: str) -> None:
        chunks = connection.stream("/v1/completions", body | {"prompt": prompt})
        conversation.show(chunks, with_stats=args.stats)

    conversation.answer_all(args.quick, complete)
