"""The OpenAI server: HTTP in front of `kvllm.async_llm.AsyncLLM`."""
