"""What llama.cpp makes of it: tensors by name and role, keys, vocabulary."""
