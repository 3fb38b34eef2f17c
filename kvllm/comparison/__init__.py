"""What compression costs on a model and texts of one's own: the parts of `kvllm compare`."""
