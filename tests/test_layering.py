"""Who may include or import whom, in C++, in Python, and among the tests. docs/how-it-works.md draws it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from reference import ROOT

CSRC, PACKAGE, TESTS = ROOT / "csrc", ROOT / "python" / "ggml_tern", ROOT / "tests"

#: For each room of csrc/ those that it may include from.
CPP_ROOMS: dict[str, set[str]] = {
    "format": set(),
    "model": {"format"},
    "cpu": {"format"},
    "host": {"format"},
    "plan": {"format", "model", "host"},
    "gpu": {"format", "model", "cpu", "host", "plan"},
    "backend": {"format", "model", "cpu", "host", "plan", "gpu"},
    "bindings": {"format", "cpu", "host"},
}

#: What every room of the package may use: files at its root that know no other room, and what all say of
#: tensors.
COMMON = {
    "",
    "_core",
    "atomic_file",
    "errors",
    "limits",
    "memory_size",
    "ordered",
    "progress",
    "tensors",
    "wrapping",
}
#: For each room of the package those that it may import from, besides COMMON.
PYTHON_ROOMS: dict[str, set[str]] = {
    "gguf": set(),
    "host": set(),
    "plots": set(),
    "plan": {"gguf", "host", "plots"},
    "client": set(),
    "bench": {"client", "gguf", "host", "plan", "plots"},
    "serve": {"gguf", "host", "plan"},
    "chat": {"client", "gguf", "host", "plan", "serve"},
    "llama": {"host"},
    "evaluate": {"convert", "convert/model", "gguf", "host"},
    "convert/read": {"gguf"},
    "convert/model": {"convert/read", "gguf"},
    "convert/rotate": {"convert/model", "convert/read", "gguf"},
    "convert/quantize": {"convert/rotate", "convert/model", "convert/read", "gguf"},
    "convert/write": {"convert/quantize", "convert/rotate", "convert/model", "convert/read", "gguf"},
    "convert": {f"convert/{floor}" for floor in ("read", "model", "rotate", "quantize", "write")} | {"gguf"},
    "cli": {
        *("bench", "chat", "convert", "evaluate", "gguf", "host", "plan", "plots", "serve"),
        *("convert/read", "convert/model", "convert/rotate", "convert/quantize"),
    },
    "api": {
        *("convert", "convert/read", "convert/model", "convert/rotate", "gguf", "host", "llama", "plan"),
    },
    "__main__": {"host"},
}

Graph = Mapping[str, set[str]]


# ---- who includes whom ----


def includes() -> dict[str, set[str]]:
    """For each file of csrc/, as ROOM/NAME, those of csrc/ that it includes."""
    found: dict[str, set[str]] = {}
    for path in sorted([*CSRC.rglob("*.cpp"), *CSRC.rglob("*.h")]):
        names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
        files = [base / name for name in names for base in (path.parent, CSRC) if (base / name).exists()]
        found[str(path.relative_to(CSRC))] = {str(file.resolve().relative_to(CSRC)) for file in files}
    return found


# ---- who imports whom ----


def module_name(path: Path) -> str:
    """Within the package: its dotted name, empty for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """The modules of the package that a file names in imports: at its head, in functions, for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their module in full"
            # What is imported from a package may be a module or something that the package itself holds.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "ggml_tern":
                inside = name.removeprefix("ggml_tern").removeprefix(".")
                yield inside if inside in modules else inside.rpartition(".")[0]


def imports() -> dict[str, set[str]]:
    """For each module of the package those of the package that it imports."""
    files = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    modules = {*files, "_core"}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    return {name: set(imported(tree, modules)) - {name} for name, tree in trees.items()}


def python_room(module: str) -> str:
    """A folder or a file of the package, or a floor of convert."""
    first, _, rest = module.partition(".")
    floor = rest.partition(".")[0]
    return f"{first}/{floor}" if (PACKAGE / first / floor).is_dir() and floor else first


# ---- the rules ----


def trespasses(graph: Graph, allowed: Mapping[str, set[str]], room_of: Mapping[str, str]) -> list[str]:
    """Edges of a graph that lead from a room into one that it may not know."""
    return [
        f"{one} → {other}"
        for one, others in graph.items()
        for other in sorted(others)
        if room_of[one] != room_of[other] and room_of[other] not in allowed[room_of[one]]
    ]


def circle(graph: Graph) -> str:
    """The first circle of a graph; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " → ".join(error.args[1])
    return ""


def cpp_rooms(graph: Graph) -> dict[str, str]:
    return {name: name.partition("/")[0] for name in graph}


def python_rooms(graph: Graph) -> dict[str, str]:
    return {name: python_room(name) for name in {*graph, "_core"}}


def test_cpp_rooms_know_who_they_may_know() -> None:
    graph = includes()
    assert {*cpp_rooms(graph).values()} == {*CPP_ROOMS}
    assert trespasses(graph, CPP_ROOMS, cpp_rooms(graph)) == []


def test_cpp_files_include_each_other_in_no_circle() -> None:
    assert circle(includes()) == ""
    assert circle(CPP_ROOMS) == ""


def test_python_rooms_know_who_they_may_know() -> None:
    graph = imports()
    assert {*python_rooms(graph).values()} == {*PYTHON_ROOMS} | COMMON
    allowed = {room: others | COMMON for room, others in PYTHON_ROOMS.items()}
    # `ggml_tern` itself gives its users what is in its rooms.
    allowed |= dict.fromkeys(COMMON, COMMON) | {"": COMMON | {"api", "host", "llama"}}
    assert trespasses(graph, allowed, python_rooms(graph)) == []


def test_python_modules_import_each_other_in_no_circle() -> None:
    """Nor do they by way of a function or for the sake of types."""
    graph = {
        # `ggml_tern` has not been read to its end when a module in it is imported, which asks it for _core.
        name: {other for other in others if other}
        for name, others in imports().items()
    }
    assert circle(graph) == ""


def neighbours(graph: Graph, room_of: Mapping[str, str]) -> dict[str, set[str]]:
    """For each room those that it includes or imports from."""
    found: dict[str, set[str]] = {room: set() for room in room_of.values()}
    for one, others in graph.items():
        found[room_of[one]] |= {room_of[other] for other in others} - {room_of[one]}
    return found


def test_the_drawing_is_what_is_so() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    lines = re.findall(r"^(\S+) +→ (.+)$", text, re.MULTILINE)
    drawn = {room: set(others.split(", ")) - {"-"} for room, others in lines}
    cpp, python = includes(), imports()
    is_so = {f"csrc/{room}": others for room, others in neighbours(cpp, cpp_rooms(cpp)).items()}
    of_package = neighbours(python, python_rooms(python))
    is_so |= {room: of_package[room] - COMMON for room in PYTHON_ROOMS}
    assert drawn == is_so


def test_no_test_imports_another_test() -> None:
    """What several tests need is in a file of its own."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found[path.name] += [name for name in names if name.rpartition(".")[2].startswith("test_")]
    assert len(found) > 50
    assert {name: tests for name, tests in found.items() if tests} == {}


@pytest.mark.parametrize(
    "text", ["import {}", "def f():\n    from {} import x", "if TYPE_CHECKING:\n    import {}"]
)
def test_every_import_is_seen(text: str) -> None:
    modules = {"convert.read.lora", "convert.read", "convert"}
    tree = ast.parse(text.format("ggml_tern.convert.read.lora"))
    assert list(imported(tree, modules)) == ["convert.read.lora"]


def test_a_trespass_and_a_circle_are_found() -> None:
    graph = {"format/a.h": {"cpu/b.h"}, "cpu/b.h": {"format/a.h"}}
    assert trespasses(graph, {"format": set(), "cpu": {"format"}}, cpp_rooms(graph)) == [
        "format/a.h → cpu/b.h"
    ]
    assert "cpu/b.h" in circle(graph)
