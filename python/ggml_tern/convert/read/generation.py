"""generation_config.json as the sampling defaults that llama.cpp's programs take from a GGUF."""

from __future__ import annotations

import math
from typing import Any

import gguf

from ggml_tern.convert.read.tokenizer_files import TokenizerFiles
from ggml_tern.errors import TernError

_General = gguf.Keys.General

#: Key in generation_config.json -> key in the GGUF.
_SAMPLING = {
    "temperature": _General.SAMPLING_TEMP,
    "top_k": _General.SAMPLING_TOP_K,
    "top_p": _General.SAMPLING_TOP_P,
    "min_p": _General.SAMPLING_MIN_P,
    "repetition_penalty": _General.SAMPLING_PENALTY_REPEAT,
}

#: What llama.cpp has no default for in a file, and the value that does nothing.
_WITHOUT_KEY = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
}


def read_sampling(files: TokenizerFiles, notes: list[str]) -> dict[str, int | float]:
    """GGUF key -> value: an int for top_k, floats for the rest.

    Raises TernError for a value that is not a finite number.
    """
    where = files.directory / "generation_config.json"
    found: dict[str, int | float] = {}
    for name, key in _SAMPLING.items():
        value: Any = files.generation.get(name)
        if value is None:
            continue
        kinds: tuple[type, ...] = (int,) if name == "top_k" else (int, float)
        if type(value) not in kinds or not math.isfinite(value):
            expected = "a whole number" if name == "top_k" else "a number"
            raise TernError(f"{where}: {name} is {value!r}; expected {expected}: mend or remove it")
        found[key] = value if name == "top_k" else float(value)
    if files.generation.get("do_sample") is False:
        # The likeliest token every time: to llama.cpp that is temperature 0.
        found.setdefault(_General.SAMPLING_TEMP, 0.0)
    lost = [
        f"{name} {files.generation[name]}"
        for name, nothing in _WITHOUT_KEY.items()
        if files.generation.get(name) not in (None, nothing)
    ]
    if lost:
        notes.append(f"generation_config.json asks for {', '.join(lost)}, which a GGUF cannot say")
    return found


def add_sampling(writer: gguf.GGUFWriter, sampling: dict[str, int | float]) -> None:
    """Write what gguf-py has not written already with the general metadata (it reads the file too, but knows
    fewer of the keys)."""
    for key, value in sampling.items():
        if not any(key in part for part in writer.kv_data):
            (writer.add_int32 if isinstance(value, int) else writer.add_float32)(key, value)  # type: ignore[arg-type]
