"""generation_config.json as the sampling defaults that llama.cpp's programs take from a GGUF."""

from __future__ import annotations

from typing import Any

import gguf

from ggml_tern.convert.read.tokenizer_files import TokenizerFiles
from ggml_tern.errors import TernError
from ggml_tern.limits import MAX_VOCABULARY, MOST_NUMBER, checked_integer, checked_number, shown

_General = gguf.Keys.General

#: Key in generation_config.json -> key in the GGUF, of whole numbers and of others. What transformers does
#: not know is what gguf-py reads there.
_WHOLE = {
    "top_k": _General.SAMPLING_TOP_K,
    "penalty_last_n": _General.SAMPLING_PENALTY_LAST_N,
    "mirostat": _General.SAMPLING_MIROSTAT,
}
_SAMPLING = {
    **_WHOLE,
    "temperature": _General.SAMPLING_TEMP,
    "top_p": _General.SAMPLING_TOP_P,
    "min_p": _General.SAMPLING_MIN_P,
    "penalty_repeat": _General.SAMPLING_PENALTY_REPEAT,
    "repetition_penalty": _General.SAMPLING_PENALTY_REPEAT,
    "xtc_probability": _General.SAMPLING_XTC_PROBABILITY,
    "xtc_threshold": _General.SAMPLING_XTC_THRESHOLD,
    "mirostat_tau": _General.SAMPLING_MIROSTAT_TAU,
    "mirostat_eta": _General.SAMPLING_MIROSTAT_ETA,
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

_WAY_OUT = "mend or remove it"


def read_sampling(files: TokenizerFiles, notes: list[str]) -> dict[str, int | float]:
    """GGUF key -> value: ints for what is whole, floats for the rest.

    Raises TernError for a value that is no number, or one that no sampler means.
    """
    where = str(files.directory / "generation_config.json")
    found: dict[str, int | float] = {}
    for name, key in _SAMPLING.items():
        value: Any = files.generation.get(name)
        if value is None:
            continue
        if name in _WHOLE:
            found[key] = checked_integer(value, where, name, -1, MAX_VOCABULARY, _WAY_OUT)
        else:
            found[key] = checked_number(value, where, name, -MOST_NUMBER, MOST_NUMBER, _WAY_OUT)
    if files.generation.get("do_sample") is False:
        # The likeliest token every time: to llama.cpp that is temperature 0.
        found.setdefault(_General.SAMPLING_TEMP, 0.0)
    # gguf-py takes it for a list of samplers.
    sequence = files.generation.get("sequence")
    if sequence is not None and not isinstance(sequence, str):
        raise TernError(f"{where}: sequence is {shown(sequence)}; expected a text; {_WAY_OUT}")
    lost = [
        f"{name} {shown(files.generation[name])}"
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
