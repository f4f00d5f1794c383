"""What test_hostile_numbers.py runs in a process of its own, whose memory is bounded: every number of some
files replaced by others, one at a time.

python hostile_numbers.py checkpoint DIRECTORY   # config.json, generation_config.json, adapter_config.json
python hostile_numbers.py keys DIRECTORY         # the keys of GGUF files, which are written there

Prints a line for everything that ends neither well nor in a TernError of one line, and how many cases there
were.
"""

from __future__ import annotations

import copy
import json
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.model.models import open_model
from ggml_tern.convert.pipeline import convert
from ggml_tern.convert.read.lora import open_adapter
from ggml_tern.errors import TernError
from ggml_tern.plan import arithmetic, header, tables
from ggml_tern.plan.fit import fit
from ggml_tern.serve import memory
from ggml_tern.tensors.types import Q8_0
from model_headers import Header, decoder_header, hybrid_header

#: What is put in the place of a number. JSON has the last ones only as Python writes and reads it.
HOSTILE: list[Any] = [
    *(-1, 0, 1, 2, 3, 33, 511, 512, 513, 1025, 200_000, 2**20, 2**24, 2**31, 2**32 - 1, 2**32, 2**63, 2**64),
    *(10**30, 10**400, -(10**400), 0.5, 2.0, -0.25, 1e-320, 1e-30, 1e30, 1e300, 1e400, -1e400),
    *(float("nan"), True, False, "7", "", [], [1], [2**32 - 1], [10**400] * 2, {}, {"a": 1}, None),
]
#: The same for the keys of a GGUF file, whose integers have 64 bits.
HOSTILE_KEYS = [
    item
    for item in HOSTILE
    if item is not None
    and not isinstance(item, dict)
    and not (isinstance(item, int) and not -(2**63) <= item < 2**64)
    and item not in ([10**400] * 2, 1e300, 1e30)
]
HOSTILE_KEYS += [[2**64 - 1] * 600, [-1] * 600, ["a"] * 600, [0] * 600, [True] * 600, [0.5] * 600]

#: What all cases together may take beyond what the imports took.
MEMORY = 400 << 20


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where numbers stand in JSON; a list of them counts as one, too."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, (*path, key))
    elif isinstance(value, list):
        if value and isinstance(value[0], int):
            yield path
        for index, item in enumerate(value):
            yield from numbers(item, (*path, index))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def replaced(value: Any, path: tuple[Any, ...], item: Any) -> Any:
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = item
    return value


def bound_memory() -> None:
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


def ends_well(what: str, run: Callable[[], object]) -> bool:
    """Whether it returned or raised a TernError of one short line; tells if not."""
    try:
        run()
    except TernError as error:
        if "\n" in str(error) or len(str(error)) > 600:
            print(f"{what}: {str(error)[:900]!r}")
            return False
    except BaseException:
        print(f"{what}: {traceback.format_exc(limit=-3)}")
        return False
    return True


def check_checkpoint(directory: Path) -> int:
    output = directory / "out.gguf"
    adapter = directory / "adapter"

    def run() -> None:
        adapters = [open_adapter(adapter)] if adapter.is_dir() else []
        convert(directory, output, TypeChoice(Q8_0), adapters=adapters, force=True, n_threads=1)

    run()
    bound_memory()
    cases = 0
    for path in [
        file
        for file in (
            directory / "config.json",
            directory / "generation_config.json",
            adapter / "adapter_config.json",
        )
        if file.is_file()
    ]:
        text = path.read_text(encoding="utf-8")
        original = json.loads(text)
        for where in numbers(original):
            for item in HOSTILE:
                path.write_text(json.dumps(replaced(original, where, item)), encoding="utf-8")
                ends_well(f"{path.name}: {where} = {str(item)[:40]}", run)
                cases += 1
        path.write_text(text, encoding="utf-8")
    return cases


def headers() -> Iterator[tuple[Header, list[str]]]:
    """A file of every kind of architecture, and its numeric keys, those included that it need not have."""
    attention = ["head_count", "head_count_kv", "key_length", "value_length", "sliding_window"]
    common = ["block_count", "context_length", "embedding_length", "expert_count", "expert_used_count"]
    common += [f"attention.{key}" for key in attention] + ["vocab_size", "attention.sliding_window_pattern"]
    ssm = ["group_count", "time_step_rank", "state_size", "inner_size", "conv_kernel"]
    hybrid = [*common, "nextn_predict_layers", "full_attention_interval", "attention.recurrent_layers"]
    hybrid += [f"ssm.{key}" for key in ssm]
    yield decoder_header("llama", 2), common
    window = {"attention.sliding_window": 512}
    yield decoder_header("gemma3", 7, **window), common
    yield decoder_header("qwen3moe", 1, expert_count=5, expert_used_count=2), common
    small = hybrid_header(4, 142, 256, 512, (4, 2, 64), (2, 6, 64), nextn_predict_layers=0)
    yield small, hybrid


def check_keys(directory: Path) -> int:
    path = directory / "m.gguf"

    def run() -> None:
        model = header.read_model(path)
        tables.as_json(model, arithmetic.plan(model, model.context), 10**9, None)
        arithmetic.needs_dense(model, 10**9, None, "f16")
        demand = memory.demand({"model": str(path)})
        fit(demand, 10**12, chooses_layout=True)

    def convert_again() -> None:
        open_model(path)

    for made, _ in headers():
        made.write(path)
        run()
    bound_memory()
    cases = 0
    for made, keys in headers():
        for key in keys:
            for item in HOSTILE_KEYS:
                made.write(path, **{key: item})
                what = f"{made.architecture}.{key} = {str(item)[:40]}"
                ends_well(what, run)
                ends_well(f"{what}, converted", convert_again)
                cases += 1
    return cases


if __name__ == "__main__":
    check = {"checkpoint": check_checkpoint, "keys": check_keys}[sys.argv[1]]
    print(f"{check(Path(sys.argv[2]))} cases")
