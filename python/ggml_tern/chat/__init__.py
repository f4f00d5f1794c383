"""``tern chat``: a llama-server of its own or a running one, and a conversation with it."""
