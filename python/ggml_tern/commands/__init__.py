"""The commands of ``tern`` that have a module of their own; the work itself is in ``ggml_tern.runtime``."""
