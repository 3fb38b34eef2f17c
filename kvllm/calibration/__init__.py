"""What a checkpoint's own queries and layers are like on a text: the parts of `kvllm calibrate`."""
