# `make demo`, `make test`, `make bench`: each sets up .venv when it is not there or out of date.
# PYTHON=python3.12 chooses the interpreter of a new .venv; JAX_PLATFORMS=cuda the device (the processor by default).
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
VENV ?= .venv
BIN := $(VENV)/bin

export JAX_PLATFORMS ?= cpu

.PHONY: demo test lint bench

demo: $(VENV)/.installed-parity
	$(BIN)/flax-gpt demo

# BENCH=--quick for two minutes, BENCH=--full for a night, BENCH=--resume to go on.
bench: $(VENV)/.installed-bench
	$(BIN)/flax-gpt bench $(BENCH)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "not slow"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The stamp of an extra: the package itself and what that extra asks for, at the versions of constraints.txt.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[$*]'
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found: name one with PYTHON=/path/to/python3" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
