"""GGUF, llama.cpp's format: one file, or several parts of one, with weights, config and tokenizer."""
