"""Clients of a server with OpenAI's routes: what `kvllm chat`, `complete`, `top` and `bench serve` have in common."""
