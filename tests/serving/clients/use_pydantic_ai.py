"""pydantic-ai: an agent over the Responses API that leaves its history to the server. Arguments: URL, MODEL."""

from __future__ import annotations

import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

url, model = sys.argv[1:]
responses = OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="unused"))
settings = OpenAIResponsesModelSettings(temperature=0, openai_previous_response_id="auto")
agent = Agent(responses, model_settings=settings)
first = agent.run_sync("Is it fine?")
second = agent.run_sync("And now?", message_history=first.all_messages())
tokens = [first.usage.input_tokens, second.usage.input_tokens]
print(json.dumps({"texts": [first.output, second.output], "tokens": tokens}))
