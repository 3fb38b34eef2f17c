"""Checks and measurements on a GPU, one subject in each file. `benchmarks.device_check` runs them."""
