"""Attention backends, the paged KV cache, and its compression."""
