"""What a machine would do: the real scheduler over a workload, with a roofline in place of the tensors."""
