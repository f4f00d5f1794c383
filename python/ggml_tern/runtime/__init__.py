"""Running models: the plug-in inside a stock llama.cpp host."""
