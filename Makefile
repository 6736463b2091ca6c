# make speedrun   see it work: from nothing to a small chat model, in minutes on two CPU cores
# make test       lint, types and every test that this machine can run
# make test-gpu   the GPU tests, by the environment of make test or else python3; installs nothing; JOBS=1: one by one
# make lint       ruff and mypy alone;  make format: let ruff arrange the code
# make clean      remove the virtual environment and caches (never your data)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Most of a GPU test is compiling on a CPU: four files at a time, those that take longest first.
JOBS      ?= 4
LONG      := $(patsubst %,tests/gpu/test_%_on_gpu.py,killed_runs training fp8 micro)
GPU_PYTHON := $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(VENV)/installed-dev)),$(BIN)/python,$(PYTHON))
GPU_TESTS := $(LONG) $(filter-out $(LONG),$(wildcard tests/gpu/test_*.py))

.DEFAULT_GOAL := help
.PHONY: help speedrun test test-gpu lint format clean

help:
	@sed -n '/^$$/q; s/^# //p' Makefile

speedrun: $(VENV)/installed
	$(BIN)/nanorun speedrun

test: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-gpu:
	@$(GPU_PYTHON) -c "import torch, pytest" 2>/dev/null || \
	  { echo "$(GPU_PYTHON) has no torch or no pytest: run make test once, or say make test-gpu PYTHON=..."; exit 2; }
	@$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) --output-sync=target $(GPU_TESTS:%=%.gpu)

%.gpu:
	$(GPU_PYTHON) -m pytest $* || test $$? -eq 5  # 5: nothing in it for this machine

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("nanorun needs Python 3.11 or newer and $(PYTHON) is " + sys.version.split()[0] + ": name another with make PYTHON=python3.12 ...")'
	@echo "creating $(VENV) and installing nanorun into it (a minute or two, once)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[serve]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@# a CPU build of torch brings no Triton; with it, the kernels' tests run through its interpreter
	@$(BIN)/python -c 'import triton' 2>/dev/null || \
		$(PIP) --no-deps 'triton==3.6.0; platform_system == "Linux" and platform_machine == "x86_64"'
	@touch $@ $(VENV)/installed
