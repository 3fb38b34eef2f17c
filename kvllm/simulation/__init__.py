"""Simulation of a machine: the real scheduler over a workload, with a roofline in place of the tensors."""
