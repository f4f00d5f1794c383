"""``tern plan``: the memory that a model will take, from its header alone."""
