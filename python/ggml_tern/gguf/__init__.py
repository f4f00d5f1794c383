"""GGUF files as they lie on the disk: reading them as sources, describing, repacking and hashing them.

`reader` opens a file and decodes its rows; `i2_s` knows the one type that _core's codecs do not;
`inspection`, `repacking` and `digest` are the commands ``tern inspect``, ``tern repack`` and ``tern hash``.
"""
