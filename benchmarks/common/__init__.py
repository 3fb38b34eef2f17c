"""Libraries that the benchmarks share. Scripts import these, and never each other."""
