"""LoRA adapters: which one a request asks for, the files of one, and the product beside that of a weight."""
