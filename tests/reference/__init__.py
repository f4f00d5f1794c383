"""Plain references that the compiled code is tested against, and the little that tests need to ask a host."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
