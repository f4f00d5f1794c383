"""How much memory there is: what the machine has, and what control groups leave of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ggml_tern import _core

GIB = 1 << 30
MACHINE = {"proc/meminfo": f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {9 << 20} kB\n"}


def v2(group: str, limit: int | str, used: int, inactive_file: int = 0) -> dict[str, str]:
    """The files of a control group of version 2."""
    folder = f"sys/fs/cgroup{group}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\nfile 7\ninactive_file {inactive_file}\n",
    }


def v1(group: str, limit: int, used: int, inactive_file: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{group}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive_file}\n",
    }


def own_group(*lines: str) -> dict[str, str]:
    return {"proc/self/cgroup": "".join(f"{line}\n" for line in lines)}


SERVICE = own_group("0::/system.slice/tern.service")
V1 = own_group("9:name=systemd:/", "4:memory:/docker/7c0f", "0::/")
CASES = {
    "no groups": ({}, (16, 9)),
    "no limit": ({**own_group("0::/"), **v2("", "max", 3 * GIB)}, (16, 9)),
    "container": ({**own_group("0::/"), **v2("", 8 * GIB, 3 * GIB)}, (8, 5)),
    "container with files in the cache": ({**own_group("0::/"), **v2("", 8 * GIB, 7 * GIB, 5 * GIB)}, (8, 6)),
    "container on a busy machine": ({**own_group("0::/"), **v2("", 12 * GIB, 1 * GIB)}, (12, 9)),
    "full container": ({**own_group("0::/"), **v2("", 8 * GIB, 9 * GIB)}, (8, 0)),
    "service": ({**SERVICE, **v2("/system.slice/tern.service", 4 * GIB, GIB)}, (4, 3)),
    "service in a smaller slice": (
        {**SERVICE, **v2("/system.slice", 2 * GIB, GIB), **v2("/system.slice/tern.service", 4 * GIB, GIB)},
        (2, 1),
    ),
    "service in a full slice": (
        {**SERVICE, **v2("/system.slice", 8 * GIB, 7 * GIB), **v2("/system.slice/tern.service", 4 * GIB, 0)},
        (4, 1),
    ),
    "version 1": ({**V1, **v1("/docker/7c0f", 8 * GIB, 7 * GIB, 4 * GIB)}, (8, 5)),
    "version 1 seen from inside": ({**V1, **v1("", 8 * GIB, 3 * GIB)}, (8, 5)),
    "version 1 without a limit": ({**V1, **v1("/docker/7c0f", 0x7FFFFFFFFFFFF000, GIB)}, (16, 9)),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_that_groups_leave(case: str, tmp_path: Path) -> None:
    files, (total, free) = CASES[case]
    for name, text in (MACHINE | files).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    assert _core.machine_memory(str(tmp_path)) == (total * GIB, free * GIB)


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert _core.machine_memory(str(tmp_path)) == (0, 0)


def test_this_machine() -> None:
    total, free = _core.machine_memory()
    assert 0 < free <= total
