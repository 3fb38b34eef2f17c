"""langchain-openai: chats, streams, tools, structured output and completions. Arguments: URL, MODEL."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class GetWeather(BaseModel):
    """What the weather is like."""

    city: Literal["Paris", "Rome"]


url, model = sys.argv[1:]
server: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "unused", "model": model, "temperature": 0}
chat = ChatOpenAI(**server, max_retries=0)


async def streamed() -> str:
    """The text of a chat's stream."""
    return "".join([str(chunk.content) async for chunk in chat.astream("Is it fine?")])


answer = chat.invoke([("system", "Be brief."), ("user", "Is it fine?")])
batch = chat.batch(["Is it fine?", "And now?"])
called = chat.bind_tools([GetWeather], tool_choice="GetWeather").invoke("Is it fine?")
# A rule of its own in place of the model's usual answer: several methods, each a field of its own.
parsed = [
    chat.with_structured_output(GetWeather, method=method).invoke("Is it fine?")
    for method in ("json_schema", "function_calling")
]
usage: Any = answer.usage_metadata
found = {
    "content": answer.content,
    "tokens": usage["output_tokens"],
    "batch": [each.content for each in batch],
    "streamed": asyncio.run(streamed()),
    "call": called.tool_calls[0],
    "parsed": [each.city for each in parsed if isinstance(each, GetWeather)],
    "text": OpenAI(**server, max_tokens=5).invoke("Is it fine?"),
}
print(json.dumps(found))
