"""The brain of the engine: plain Python that knows lengths and block ids, and imports no torch."""
