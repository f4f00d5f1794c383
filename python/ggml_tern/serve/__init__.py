"""``tern serve``: the stock llama-server with the plug-in, checked before and supervised afterwards."""
