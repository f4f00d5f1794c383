# Entry points: `make help` lists them. Everything is installed into .venv, and the pinned llama.cpp is built once into the
# cache folder ($TERN_CACHE_DIR, default ~/.cache/ggml-tern). Needs Python 3.11 with venv, g++ and make; brings the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
PY := .venv/bin/python
CXX_FILES = $(shell find csrc tests -name '*.cpp' -o -name '*.h')

# The venv's cmake and ninja, for all that is started here.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Prints the requirements of pyproject.toml: those of the build with the argument "build", else those of the package with
# the extras named as arguments.
define REQUIREMENTS
import sys, tomllib
file = tomllib.load(open("pyproject.toml", "rb"))
if sys.argv[1] == "build":
    found = file["build-system"]["requires"] + ["cmake>=3.21", "ninja"]
else:
    extras = file["project"]["optional-dependencies"]
    found = file["project"]["dependencies"] + [line for name in sys.argv[1:] for line in extras[name]]
print("\n".join(line for line in found if not line.startswith("ggml-tern")))
endef
export REQUIREMENTS

# What `build` installs beside the package; `test` and `lint` ask for more.
EXTRAS := python
test pytest fuzz lint format: EXTRAS := python dev docs

# Tests run in that many processes. More than two gain little and want 3 GB of memory each.
TEST_PROCESSES ?= 2

.PHONY: help
help:  ## List these targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: demo
demo: build  ## Convert models, run them in stock llama.cpp, and chat with one
	@$(PY) tools/demo.py

.PHONY: test
test: check-style pytest  ## Check style and types, then run all tests

.PHONY: pytest
pytest: build | check-style
	@$(PY) -m pytest -n $(TEST_PROCESSES) --dist loadfile --max-worker-restart 0 --durations 25

.PHONY: fuzz
fuzz: build  ## Run what takes random inputs with other ones, then fuzz the header reader for FUZZ_SECONDS (600)
	@seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); \
	echo "TERN_TEST_SEED=$$seed"; \
	TERN_TEST_SEED=$$seed $(PY) -m pytest -n $(TEST_PROCESSES) --dist loadfile -m random_inputs
	@tests/fuzz/run.sh $(FUZZ_SECONDS)

.PHONY: lint
lint: check-style  ## Check style and types: ruff, mypy, clang-format

.PHONY: check-style
check-style: build
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy
	@.venv/bin/clang-format --dry-run -Werror $(CXX_FILES)

.PHONY: format
format: build  ## Put all files into the style that lint checks
	@$(PY) -m ruff check --fix --exit-zero
	@$(PY) -m ruff format
	@.venv/bin/clang-format -i $(CXX_FILES)

.PHONY: docs
docs: EXTRAS := python dev docs
docs: build  ## Build the site of docs/ into build/site
	@$(PY) -m mkdocs build --strict

# An editable install: Python files are used where they lie; after a change in csrc/ this compiles what changed.
.PHONY: build
build: dependencies  ## Build and install into .venv, incrementally
	@$(PY) tools/build_llama_cpp.py build > /dev/null
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation -C build-dir=build/dev -e .

# The stamp is named after the extras: another set, or another pyproject.toml, installs anew.
.PHONY: dependencies
dependencies: .venv/bin/pip
	@stamp=".venv/.have-$(subst $() ,-,$(EXTRAS))-$$(sha256sum pyproject.toml | cut -c1-16)"; \
	if [ ! -e "$$stamp" ]; then \
	    $(PY) -m pip install -r <($(PY) -c "$$REQUIREMENTS" build); \
	    $(PY) tools/build_llama_cpp.py bindings > /dev/null; \
	    $(PY) -m pip install -r <($(PY) -c "$$REQUIREMENTS" $(EXTRAS)); \
	    touch "$$stamp"; \
	fi

.venv/bin/pip:
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11)' 2>/dev/null \
	    || { echo "$(PYTHON) is missing or older than 3.11: name another one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv .venv \
	    || { echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }

.PHONY: clean
clean:  ## Remove what the build and the tests left here (not .venv, not the cache folder)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
