"""Attention over the paged KV cache: the interface, its backends, and the choice between them."""
