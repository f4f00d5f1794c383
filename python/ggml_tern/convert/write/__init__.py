"""The GGUF file, from its header to the last tensor."""
