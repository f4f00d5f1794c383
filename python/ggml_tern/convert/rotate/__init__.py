"""The Hadamard-rotated basis: what is folded, how it is recognized and said."""
