"""The engines that benchmarks/peers.py compares: one child program for each, and the environments that they run in."""
