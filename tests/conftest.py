"""What all tests share."""

import os
import signal

import numpy as np
import pytest

from ggml_tern.host import stock as host

# A llama-cpp-python without libraries of its own, as `make test` installs it, gets ours.
os.environ.update(host.library_variables())

# A shell ignores Ctrl-C for its background jobs and all they start. Tests send it and expect an answer.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def rng() -> np.random.Generator:
    """Random inputs, fresh in every run; a test that fails prints the seed that repeats them."""
    seed = int(os.environ.get("TERN_TEST_SEED") or int.from_bytes(os.urandom(8), "little"))
    print(f"TERN_TEST_SEED={seed}")
    return np.random.default_rng(seed)
