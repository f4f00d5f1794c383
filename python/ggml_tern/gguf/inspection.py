"""``tern inspect``: what a GGUF file holds, and what will run it.

`describe` gathers the facts as plain data, whose keys are the schema of ``--json``; `print_description` shows
the same to people.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.gguf import bitnet
from ggml_tern.gguf.architectures import STOCK_ARCHITECTURES, is_embedding_model, writes_no_text
from ggml_tern.gguf.digest import canonical_blocks
from ggml_tern.gguf.model_file import why_no_model
from ggml_tern.gguf.reader import HADAMARD, ROTATED_TYPES, GGUFSource, GGUFTensor
from ggml_tern.tensors.names import kind_name, printable
from ggml_tern.wrapping import print_wrapped, whole

#: Elements of an array that are told.
_FIRST = 8
#: Characters of a string that people are shown.
_LONGEST = 100

#: For every byte of four 2-bit codes, how many of them are 1, which stands for zero.
_ZEROS = np.array([sum(byte >> shift & 3 == 1 for shift in (0, 2, 4, 6)) for byte in range(256)], np.uint8)


def describe(
    source: GGUFSource, *, stats: bool = False, advance: Callable[[int], None] = lambda nbytes: None
) -> dict[str, Any]:
    """All that is known about a file, as JSON can hold it.

    Keys:
        file, version, alignment, bytes, architecture, name, parameters, bits_per_weight: of the whole model;
        what is not said is null.
        parts: list of file, bytes, tensors.
        types: list of type, id, tensors, weights, bits_per_weight, bytes, zero_share, the type with the most
        weights first; zero_share is null without `stats` and for what is not ternary.
        legacy_q2_0: whether PQ2_0 blocks stand under the id of Q2_0.
        rotation: null, or version, block_size, sign_mode, tied_output, gdn_v_grouped, weights,
        inverse_weights, and error: null, or why no program will run the file.
        runs: stock, plugin (whether llama.cpp runs it, alone and with the plug-in), notes (list of lines).
        metadata: key to number, bool or string; for an array to its length and its first elements.
        tensors: list of name, type, shape (n_in last), bytes.

    stats: decode the ternary tensors to count their zeros; `advance` is told their bytes meanwhile.
    """
    tensors = list(source.tensors.values())
    zeros = _count_zeros(tensors, advance) if stats else {}
    n_weights = sum(tensor.n_weights for tensor in tensors)
    nbytes = sum(tensor.data.nbytes for tensor in tensors)
    name = source.metadata.get("general.name")
    return {
        "file": str(source.path),
        "parts": [
            {
                "file": str(part.path),
                "bytes": part.header["file_size"],
                "tensors": len(part.header["tensors"]),
            }
            for part in source.parts
        ],
        "version": source.parts[0].header["version"],
        "alignment": source.parts[0].header["alignment"],
        "bytes": sum(part.header["file_size"] for part in source.parts),
        "architecture": source.architecture,
        "name": name if isinstance(name, str) else None,
        "parameters": n_weights,
        "bits_per_weight": _bits(nbytes, n_weights),
        "types": _types(tensors, zeros),
        "legacy_q2_0": source.is_legacy,
        "rotation": _rotation(source),
        "runs": _runs(source),
        "metadata": {key: _json_value(value) for key, value in source.metadata.items()},
        "tensors": [
            {
                "name": tensor.name,
                "type": tensor.type_name,
                "shape": list(tensor.shape),
                "bytes": tensor.data.nbytes,
            }
            for tensor in tensors
        ],
    }


def _bits(nbytes: int, n_weights: int) -> float | None:
    return round(8 * nbytes / n_weights, 4) if n_weights else None


def _types(tensors: list[GGUFTensor], zeros: dict[str, int]) -> list[dict[str, Any]]:
    """One entry for each type, the one with the most weights first."""
    groups: dict[int, list[GGUFTensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.type, []).append(tensor)
    entries = []
    for type_id, members in groups.items():
        n_weights = sum(tensor.n_weights for tensor in members)
        nbytes = sum(tensor.data.nbytes for tensor in members)
        counted = members[0].name in zeros
        entries.append(
            {
                "type": _core.type_name(type_id),
                "id": type_id,
                "tensors": len(members),
                "weights": n_weights,
                "bits_per_weight": _bits(nbytes, n_weights),
                "bytes": nbytes,
                "zero_share": (
                    round(sum(zeros[tensor.name] for tensor in members) / n_weights, 4) if counted else None
                ),
            }
        )
    return sorted(entries, key=lambda entry: -entry["weights"])


def _count_zeros(tensors: list[GGUFTensor], advance: Callable[[int], None]) -> dict[str, int]:
    """Weights that are zero in each ternary tensor, by name."""

    def count(tensor: GGUFTensor) -> int:
        return sum(int(_ZEROS[blocks[:, 2:]].sum(dtype=np.int64)) for blocks in canonical_blocks(tensor))

    ternary = [tensor for tensor in tensors if tensor.is_ternary]
    found: dict[str, int] = {}
    with ThreadPoolExecutor(thread_name_prefix="count") as pool:
        for tensor, zeros in zip(ternary, pool.map(count, ternary), strict=True):
            found[tensor.name] = zeros
            advance(tensor.data.nbytes)
    return found


def _rotation(source: GGUFSource) -> dict[str, Any] | None:
    """What the file says about its rotation. Where that breaks a rule, what can be made of it."""
    if not source.is_rotated:
        return None

    def names(key: str) -> list[str]:
        value = source.metadata.get(HADAMARD + key)
        return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []

    scalars = {
        key: _json_value(source.metadata.get(HADAMARD + key))
        for key in ("version", "block_size", "sign_mode", "tied_output", "gdn_v_grouped")
    }
    return scalars | {
        "weights": names("weight_names"),
        "inverse_weights": names("inverse_weight_names"),
        "error": _rotation_error(source),
    }


def _rotation_error(source: GGUFSource) -> str | None:
    """Why no program runs a rotated file, if none does."""
    try:
        rotations = source.rotations
    except TernError as error:
        return str(error).removeprefix(f"{source.path}: ")
    for name in rotations:
        tensor = source.tensors[name]
        if tensor.type not in ROTATED_TYPES:
            return f"tensor {printable(name)} is rotated, and nothing undoes that in {tensor.type_name}"
    return None


def _runs(source: GGUFSource) -> dict[str, Any]:
    """Whether a stock llama.cpp runs the file, alone and with the plug-in, and why not."""
    types = {tensor.type for tensor in source.tensors.values()}
    stock = plugin = True
    notes: list[str] = []
    repack = f"`tern repack {shlex.quote(str(source.path))} OUT.gguf --type pq2_0`"
    no_model = why_no_model(source.metadata, len(source.tensors))
    if no_model is not None:
        stock = plugin = False
        notes.append(f"it is {no_model[0]}; {no_model[1]}")
    elif source.architecture in bitnet.FOREIGN_ARCHITECTURES:
        stock = plugin = False
        notes.append(
            f"only bitnet.cpp knows the architecture {source.architecture}; tern repack and ternconv write "
            f"it as {bitnet.ARCHITECTURE}"
        )
    elif source.architecture not in STOCK_ARCHITECTURES:
        stock = plugin = False
        notes.append(
            f"the llama.cpp that ggml-tern comes with does not know the architecture "
            f"{printable(source.architecture or '')}; a newer one may"
        )
    elif purpose := writes_no_text(source.metadata):
        notes.append(f"it is {purpose}")
    if source.is_legacy:
        stock = False
        notes.append(
            "its PQ2_0 blocks stand under the id of Q2_0, which is another type now; the plug-in tells them "
            f"apart, and {repack} mends it"
        )
    if _core.TYPE_I2_S in types:
        stock = plugin = False
        notes.append(f"I2_S is a type of bitnet.cpp only; {_way_out_of_i2_s(source, repack)}")
    if ours := [name for name in ("PQ2_0", "PTQ1_0") if getattr(_core, f"TYPE_{name}") in types]:
        stock = False
        notes.append(f"llama.cpp does not know {' and '.join(ours)}; the plug-in adds them")
    if _core.TYPE_Q2_0 in types:
        notes.append("Q2_0 needs ggml 0.20 or newer, or the plug-in")
    if bitnet.has_squared_relu(source.metadata):
        stock = False
        by_name = {name: tensor.type for name, tensor in source.tensors.items()}
        spoiled = bitnet.notes_on_squared_relu(by_name)
        plugin = plugin and not spoiled
        notes += spoiled or [
            "llama.cpp computes SiLU where this model has squared ReLU; the plug-in mends that"
        ]
    if source.is_rotated:
        stock = False
        error = _rotation_error(source)
        plugin = plugin and error is None
        notes.append("its weights are rotated; the plug-in rotates what they are multiplied with")
        if error is not None:
            notes.append(f"the plug-in refuses it: {error}")
    if plugin:
        path = shlex.quote(str(source.first))
        if is_embedding_model(source.metadata):
            path += " --embeddings"
        notes.append(f"`tern run llama-server -m {path}`" if not stock else f"`llama-server -m {path}`")
    return {"stock": stock, "plugin": plugin, "notes": notes}


def _way_out_of_i2_s(source: GGUFSource, repack: str) -> str:
    """What makes a file that runs of one with I2_S."""
    if all(tensor.has_fp16_scale for tensor in source.tensors.values() if tensor.type == _core.TYPE_I2_S):
        return repack
    path = shlex.quote(str(source.path))
    return f"`ternconv {path} OUT.gguf`, which rounds its scales to fp16"


def _json_value(value: Any) -> Any:
    """A metadata value as JSON has it: of an array its length and its first elements."""
    if isinstance(value, list | np.ndarray):
        return {"length": len(value), "first": [_json_scalar(item) for item in value[:_FIRST]]}
    return _json_scalar(value)


def _json_scalar(value: Any) -> Any:
    """A number, bool or string; JSON has no numbers that are not finite, so these become strings."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# ---- for people ----


def print_description(found: dict[str, Any], console: Console) -> None:
    """Print what `describe` found: the facts, a line for each type, the metadata, and what runs it."""
    for name, text in _facts(found):
        value = printable(text)
        print_wrapped(f"{name:<17} ", whole(value) if name == "file" else value, console)
    console.print()
    console.print(_types_table(found))
    console.print()
    metadata = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    metadata.add_column("metadata", no_wrap=True)
    metadata.add_column("", overflow="fold")
    for key, value in found["metadata"].items():
        metadata.add_row(Text(printable(key)), Text(_shown(value)))
    console.print(metadata)
    console.print()
    for note in found["runs"]["notes"]:
        print_wrapped("note: ", printable(note), console)


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    parts = f", {len(found['parts'])} parts" if len(found["parts"]) > 1 else ""
    bits = "" if found["bits_per_weight"] is None else f", {found['bits_per_weight']:.3f} bits a weight"
    runs = found["runs"]
    return [
        ("file", found["file"]),
        ("size", f"{found['bytes'] / 1e6:.1f} MB{parts}, GGUF version {found['version']}"),
        ("architecture", printable(found["architecture"] or "none")),
        ("name", printable(found["name"] or "none")),
        ("parameters", f"{found['parameters'] / 1e6:.2f} M{bits}"),
        ("rotation", _shown_rotation(found["rotation"])),
        ("stock llama.cpp", "runs it" if runs["stock"] else "does not run it"),
        ("with the plug-in", "runs it" if runs["plugin"] else "does not run it"),
    ]


def _shown_rotation(rotation: dict[str, Any] | None) -> str:
    if rotation is None:
        return "none"
    kinds = Counter(kind_name(name) for name in rotation["weights"])
    listed = ", ".join(f"{count} {printable(kind)}" for kind, count in kinds.items())
    inverse = "".join(f", inverse {printable(name)}" for name in rotation["inverse_weights"])
    tied = ", tied" if rotation["tied_output"] else ""
    grouped = ", ssm_out in grouped order" if rotation["gdn_v_grouped"] else ""
    broken = "broken: " if rotation["error"] else ""
    return (
        f"{broken}Hadamard, blocks of {_shown(rotation['block_size'])}, "
        f"signs {_shown(rotation['sign_mode'])}, {kinds.total()} weights ({listed}){inverse}{tied}{grouped}, "
        f"version {_shown(rotation['version'])}"
    )


def _types_table(found: dict[str, Any]) -> Table:
    with_zeros = any(entry["zero_share"] is not None for entry in found["types"])
    titles = ["type", "tensors", "weights", "bits/weight", "MB"] + (["zeros"] if with_zeros else [])
    total = [
        "total",
        str(len(found["tensors"])),
        f"{found['parameters'] / 1e6:.2f} M",
        "" if found["bits_per_weight"] is None else f"{found['bits_per_weight']:.3f}",
        f"{sum(tensor['bytes'] for tensor in found['tensors']) / 1e6:.1f}",
        "",
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_footer=True)
    for title, footer in zip(titles, total, strict=False):
        table.add_column(title, footer=footer, justify="left" if title == "type" else "right", no_wrap=True)
    for entry in found["types"]:
        share = entry["zero_share"]
        table.add_row(
            f"{entry['type']} ({entry['id']})",
            str(entry["tensors"]),
            f"{entry['weights'] / 1e6:.2f} M",
            f"{entry['bits_per_weight']:.3f}",
            f"{entry['bytes'] / 1e6:.1f}",
            *(["" if share is None else f"{100 * share:.1f}%"] if with_zeros else []),
        )
    return table


def _shown(value: Any) -> str:
    """A metadata value on one line, shortened."""
    if isinstance(value, dict):
        items = ", ".join(_shown(item) for item in value["first"])
        more = f", … {value['length']} in all" if value["length"] > len(value["first"]) else ""
        return f"[{items}{more}]"
    text = f"{value:.7g}" if isinstance(value, float) else printable(str(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… {len(text)} characters"
