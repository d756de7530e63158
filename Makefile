# Every target sets up what it needs in $(VENV); nothing has to be installed by hand but Python 3.11,
# make and a C++ compiler.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The release development and CI run on; the package itself allows a range.
TORCH := torch==2.13.0
PIP_FLAGS := --quiet --disable-pip-version-check

.PHONY: demo demo-eagle3 test test-slow lint bench clean

demo: $(VENV)/.runtime
	PATH="$(abspath $(BIN)):$$PATH" scripts/demo.sh

demo-eagle3: $(VENV)/.runtime
	PATH="$(abspath $(BIN)):$$PATH" scripts/demo.sh configs/quickstart-eagle3.yaml

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'not slow'

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_docs.py

bench: $(VENV)/.dev
	for benchmark in benchmarks/bench_*.py; do $(BIN)/python $$benchmark; done

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install $(PIP_FLAGS) '$(TORCH)' -e '.[inductor]'
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/pip install $(PIP_FLAGS) '$(TORCH)' -e '.[inductor,dev]'
	touch $@
