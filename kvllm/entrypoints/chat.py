"""Chat with a running server.

    kvllm chat                     asks for messages until the end of input (Ctrl-D); /help lists commands
    kvllm chat -q "How many primes are there below 100?" --stats
    kvllm chat --system-prompt "Answer in French." < question.txt

An interrupt (Ctrl-C) while the server answers ends that answer alone.
"""

from __future__ import annotations

import argparse

from kvllm.entrypoints import conversation
from kvllm.entrypoints.chat_commands import ChatCommands


def add_arguments(parser: argparse.ArgumentParser) -> None:
    conversation.add_arguments(parser, "MESSAGE")
    parser.add_argument("--system-prompt", metavar="TEXT", help="the message of the system that the chat begins with")


def run(args: argparse.Namespace) -> None:
    from kvllm.client.connection import Connection  # its packages come with the extra `serve`

    connection = Connection(args.url, args.api_key)
    body = conversation.common_body(args, connection)
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []

    def answer(message: str) -> None:
        asked = [*messages, {"role": "user", "content": message}]
        chunks = connection.stream("/v1/chat/completions", body | {"messages": asked})
        text = conversation.show(chunks, with_stats=args.stats)
        messages[:] = [*asked, {"role": "assistant", "content": text}]

    conversation.answer_all(args.quick, answer, ChatCommands(messages, body["model"]))
