"""A pytest plug-in for llama.cpp's own server tests: our tiny model in the place of the one they download.

Loaded by benchmarks/run_server_tests.py into upstream's tests, which stay as they are. Their smallest model
(stories260K, for all that needs no certain model) becomes $TERN_TEST_MODEL; tests that want another one are
skipped.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

#: Repository and file of what is replaced, as the tests name it.
SUBSTITUTED = (
    ("ggml-org/test-model-stories260K", None),
    ("ggml-org/models", "tinyllamas/stories260K.gguf"),
)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before the first test; upstream's module can be imported since its conftest.py was."""
    import utils  # type: ignore[import-not-found, unused-ignore]

    # It would download all models.
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    start = utils.ServerProcess.start

    def start_with_our_model(server: Any, *arguments: Any, **options: Any) -> None:
        wanted = server.model_hf_repo
        if server.model_url or (wanted and (wanted, server.model_hf_file) not in SUBSTITUTED):
            pytest.skip(f"needs {wanted or server.model_url}")
        if wanted:
            server.model_hf_repo = server.model_hf_file = None
            server.model_file = os.environ["TERN_TEST_MODEL"]
        start(server, *arguments, **options)

    utils.ServerProcess.start = start_with_our_model

    def download(url: str, output_file_path: str | None = None) -> str:
        pytest.skip(f"needs {url.rpartition('/')[2]}")

    utils.download_file = download
    for item in session.items:
        module = getattr(item, "module", None)
        if module is not None and hasattr(module, "download_file"):
            module.download_file = download
