"""The one client of llama-server and of servers like it: requests, event streams, and what they say."""
