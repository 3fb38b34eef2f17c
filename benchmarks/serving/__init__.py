"""Benchmarks of serving: load over time, and what the scheduler makes of it."""
