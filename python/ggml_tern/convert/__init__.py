"""ternconv: a Hugging Face checkpoint in, a GGUF file with ternary weights out.

The conversion is a row of stages, one file each: ``checkpoint`` reads, ``architectures`` maps, ``vocab``
carries the tokenizer over, ``ternarize`` quantizes, ``writer`` writes and ``summary`` tells;
``pipeline.convert`` runs them.
"""
