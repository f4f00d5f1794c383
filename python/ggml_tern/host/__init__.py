"""The stock llama.cpp programs and libraries, and how they get the plug-in."""
