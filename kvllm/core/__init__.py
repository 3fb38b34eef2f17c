"""The brain of the engine: plain Python over lengths and block ids, without torch."""
