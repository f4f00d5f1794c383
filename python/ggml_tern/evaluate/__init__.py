"""``tern eval``: how much of a reference model is left in a model, over a text."""
