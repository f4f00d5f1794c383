"""Commands on a disk that is too small for them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def in_small_tmpfs(mount: Path, size: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command where `mount` is a file system of `size` bytes, in a mount namespace of its own."""
    mounting = f'mount -t tmpfs -o size={size} tmpfs "{mount}" || exit 99'
    script = f'{mounting}; "$@"; code=$?; ls -A "{mount}"; exit $code'
    result = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if result.returncode == 99 or "unshare:" in result.stderr:
        pytest.skip(f"this machine lets nobody mount: {result.stderr.strip()}")
    return result
