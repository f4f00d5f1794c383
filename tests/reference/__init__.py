"""Plain references that the compiled code is tested against, and the little that tests need to ask a host."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    """The script tools/NAME.py as a module. Its folder stays off the path, where it could shadow packages."""
    if name not in sys.modules:
        path = ROOT / "tools" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
