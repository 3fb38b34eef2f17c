"""Compression methods that register themselves. KvLLM imports this module by the entry point `kvllm.methods`."""

from more_methods import compactor, lagkv, leverage, vase

__all__ = ["compactor", "lagkv", "leverage", "vase"]
