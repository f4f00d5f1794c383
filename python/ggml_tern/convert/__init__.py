"""ternconv: a Hugging Face checkpoint in, a GGUF file with ternary weights out.

The conversion goes through the floors as the data does: ``read`` (what lies on the disk), ``model`` (what
llama.cpp makes of it), ``rotate``, ``quantize``, ``write``. ``pipeline.convert`` runs them, ``summary``
tells, and ``verify`` does it all again to compare.
"""
