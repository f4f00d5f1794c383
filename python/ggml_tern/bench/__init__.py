"""``tern bench``: the stock llama-bench point by point, and any OpenAI-compatible server."""
