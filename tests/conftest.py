"""What all tests share."""

import os
import signal

import hypothesis
import numpy as np
import pytest

import seeds
from ggml_tern.host import stock as host

pytest_plugins = ["no_skips"]

# A llama-cpp-python without libraries of its own, as `make test` installs it, gets ours.
os.environ.update(host.library_variables())

# A shell ignores Ctrl-C for its background jobs and all they start. Tests send it and expect an answer.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis tries the same examples in every run too, but for another seed.
hypothesis.settings.register_profile("fixed", derandomize=True)
if seeds.SEED == 0:
    hypothesis.settings.load_profile("fixed")


def pytest_report_header() -> str:
    return f"random inputs: TERN_TEST_SEED={seeds.SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make fuzz` runs."""
    for item in items:
        is_hypothesis = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if "rng" in getattr(item, "fixturenames", ()) or is_hypothesis:
            item.add_marker(pytest.mark.random_inputs)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random inputs, for each test its own; see seeds.py."""
    return seeds.rng_of(f"{request.path.name} {request.node.name}")
