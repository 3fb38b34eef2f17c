"""openai-agents: a tool of an MCP server, called through both APIs, and a response that goes on from a stored one.

Arguments: URL, MODEL.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI

url, model = sys.argv[1:]
client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
settings = ModelSettings(temperature=0)
set_tracing_disabled(True)


async def with_tool(kind: Any) -> str:
    """What the tool says, whose call ends the run."""
    program = {"command": sys.executable, "args": [str(Path(__file__).with_name("mcp_weather.py"))]}
    async with MCPServerStdio(params=program, client_session_timeout_seconds=60) as weather:  # type: ignore[arg-type]
        agent = Agent(
            name="reporter",
            instructions="Be brief.",
            model=kind(model=model, openai_client=client),
            model_settings=settings,
            mcp_servers=[weather],
            tool_use_behavior="stop_on_first_tool",
        )
        result = await Runner.run(agent, "Is it fine?")
        return str(result.final_output)


async def stored() -> dict[str, Any]:
    """Two turns, of which the second one sends its own text alone."""
    agent = Agent(name="talker", model=OpenAIResponsesModel(model=model, openai_client=client), model_settings=settings)
    first = await Runner.run(agent, "Is it fine?")
    second = await Runner.run(agent, "And now?", previous_response_id=first.last_response_id)
    tokens = [result.context_wrapper.usage.input_tokens for result in (first, second)]
    kept = await client.responses.retrieve(str(first.last_response_id))
    await client.responses.delete(str(first.last_response_id))
    return {"text": second.final_output, "tokens": tokens, "kept": kept.output_text}


async def main() -> dict[str, Any]:
    found: dict[str, Any] = {kind.__name__: await with_tool(kind) for kind in
                             (OpenAIChatCompletionsModel, OpenAIResponsesModel)}  # fmt: skip
    return found | await stored()


print(json.dumps(asyncio.run(main())))
