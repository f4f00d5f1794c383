"""The plan of a graph on made-up ones, whose tensors have addresses and no memory (plan/driver.cpp).

`ready x`: x is made ready before that product; `uses x`: it is the same as before. Products of a group may be
computed together, where the first of them stands."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import build_llama_cpp
from ggml_tern.host import stock
from isa import tools

PLANS = {
    "shared": """
        PRODUCT q  ready x  group 0
        OTHER rope_q
        PRODUCT k  uses x  group 0
        OTHER rope_k
        PRODUCT v  uses x  group 0  squared
        PRODUCT other  ready y  group 1""",
    "read": """
        PRODUCT q  ready x  group 0
        OTHER between
        PRODUCT k  uses x  group 1
        PRODUCT v  uses x  group 1""",
    "written": """
        PRODUCT q  ready x  group 0
        OTHER between
        PRODUCT k  uses x  group 1
        PRODUCT v  uses x  group 1""",
    "rotated": """
        PRODUCT first  ready x (rotation a)  group 0
        PRODUCT alike  uses x (rotation a)  group 0
        PRODUCT unlike  ready x (rotation b)  group 1
        PRODUCT plain  ready x  group 2
        PRODUCT again  ready x (rotation a)  group 3""",
    "changed": """
        PRODUCT before  ready x  group 0
        OTHER view
        PRODUCT still  uses x  group 0
        OTHER inplace
        PRODUCT after  ready x  group 1""",
    "experts": """
        EXPERT_PRODUCT gate  ready x  squared
        EXPERT_PRODUCT up  uses x
        PRODUCT shared  ready x  group 0""",
    "tied": """
        LOOK_UP embedding (rotation a)
        OTHER hidden
        PRODUCT head  ready hidden (rotation a)  group 0""",
    "skipped": """
        OTHER skipped
        PRODUCT computed  ready x  group 0""",
    "unknown": """
        PRODUCT known  ready x  group 0
        OTHER not known
        unknown: ?""",
    "devices": """
        PRODUCT first  ready x  group 0
        OTHER over x
        OTHER over second
        PRODUCT second  uses x  group 0""",
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    csrc, libraries = tools.ROOT / "csrc", stock.llama_cpp_dir()
    ggml = build_llama_cpp.Layout.from_environment().source / "ggml"
    names = (
        *("plan/plan", "format/ternary_types"),
        *("host/host_api", "host/structure_probes", "host/type_slots", "host/memory_protection"),
    )
    sources = [tools.HERE.parent / "plan" / "driver.cpp", *(csrc / f"{name}.cpp" for name in names)]
    include = [f"-isystem{ggml / folder}" for folder in ("include", "src")]
    program = tmp_path_factory.mktemp("plan") / "driver"
    link = [str(libraries / f"lib{name}.so.0") for name in ("ggml", "ggml-base")]
    return tools.build(
        program,
        tools.compiler(),
        dict.fromkeys(sources, include),
        ["-O1", "-Wall", "-Wextra", "-Werror"],
        [*link, f"-Wl,-rpath,{libraries}", "-ldl"],
    )


@pytest.mark.parametrize("graph", PLANS)
def test_plan(driver: Path, graph: str) -> None:
    done = subprocess.run([driver, graph], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == [line.strip() for line in PLANS[graph].strip().split("\n")]
