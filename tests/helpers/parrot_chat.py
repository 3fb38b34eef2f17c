"""A model with a chat template that always gives the same answer: a thought, a text and a call of a tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tests.helpers.checkpoints import edit, make_parrot
from tests.helpers.tokenizers import byte_level

# A token each, so that each has one that follows it.
THOUGHT = ["<think>", "Hm, ", "weather.", "</think>"]
CALL = ["<tool_call>", '{"name": "get_weather", "arg', 'uments": {"city": "Pa', 'ris"', "}}", "</tool_call>"]
ANSWER = ["\n", *THOUGHT, "Let me look.", *CALL, "<|im_end|>"]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }};{% endfor %}"
    "{% for message in messages %}{{ message.role + ':' + (message.content or '') }}"
    "{% if message.reasoning_content %}[{{ message.reasoning_content }}]{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\n' }}"
    "{% if opened %}<think>{% endif %}{% if closed %}<think></think>{% endif %}{% endif %}"
)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
HOUR = {"type": "integer", "minimum": 0, "maximum": 23}
TIME = {"type": "object", "properties": {"hour": HOUR}, "required": ["hour"], "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "What it is like.", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time", "parameters": TIME}},
]
QUESTION: Any = [{"role": "user", "content": "Is it fine?"}]


def make_parrot_chat(path: Path) -> None:
    """Write the model. After other tokens than those of its answer, all tokens are equally likely."""
    hf = byte_level("chat").hf
    hf.add_tokens([AddedToken(text, normalized=False) for text in ANSWER[2:-1] if text not in ("</think>",)])
    hf.chat_template = TEMPLATE
    make_parrot(path, hf, ["Ċ", *ANSWER[1:]])
    edit(path, max_position_embeddings=2048)  # its template prints tools as JSON
    byte_level.cache_clear()  # others get it without these tokens
