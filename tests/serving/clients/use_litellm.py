"""litellm: completions, chats, streams, and errors as its own exceptions. Arguments: URL, MODEL."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

url, model = sys.argv[1:]
server: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "unused", "temperature": 0}
question = [{"role": "user", "content": "Is it fine?"}]


async def streamed() -> str:
    """The text of a chat's stream."""
    stream: Any = await litellm.acompletion(f"hosted_vllm/{model}", question, stream=True, **server)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def error_of(**options: Any) -> str:
    """The name of the exception that a request ends with."""
    try:
        litellm.completion(**{"model": f"hosted_vllm/{model}", "messages": question, **server, **options})
    except Exception as error:
        return type(error).__name__
    return "none"


whole: Any = litellm.completion(f"hosted_vllm/{model}", question, **server)
text: Any = litellm.text_completion("Is it fine?", f"text-completion-openai/{model}", max_tokens=5, n=2, **server)
found = {
    "content": whole.choices[0].message.content,
    "reasoning": whole.choices[0].message.reasoning_content,
    "tokens": whole.usage.completion_tokens,
    "streamed": asyncio.run(streamed()),
    "texts": [choice.text for choice in text.choices],
    "too_long": error_of(max_tokens=100_000),
    "no_model": error_of(model="hosted_vllm/other"),
    "bad_value": error_of(temperature=-1),
}
print(json.dumps(found))
