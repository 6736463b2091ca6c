# make speedrun   see it work: from nothing to a small chat model, in minutes on two CPU cores
# make check      lint, types and the most valuable tests, in less than 2 minutes
# make test       lint, types and all but the slow tests, in less than 15 minutes on two cores
# make test-all   make test, then the slow tests (make test-slow), in less than an hour
# make test-gpu   GPU tests, with .venv if make test made it, else python3; installs nothing; JOBS=1: one at a time
# make fuzz       mutated files and requests for every parser; COUNT=40000: inputs for each
# make lint       ruff, mypy and the import rules;  make format: ruff formats and fixes
# make clean      remove the virtual environment and caches (never your data)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

# What make check runs: the golden losses of a training run, the model, the optimizer, the loader, checkpoints, the
# engine, and what the docs say.
CHECK := $(patsubst %,tests/%.py,model/test_gpt model/test_attention optim/test_optimizer optim/test_schedules \
           data/test_packing data/test_loader text/test_chat_rendering infer/test_engine infer/test_cache \
           infer/test_sampling evals/test_bpb test_checkpoint test_runs test_hardware test_console test_docs) \
         tests/train/test_training.py::test_the_first_losses_of_a_tiny_fixed_run_are_golden

# A GPU test spends most of its time compiling on the CPU: four files at a time, the longest first.
JOBS      ?= 4
LONG      := $(patsubst %,tests/gpu/test_%_on_gpu.py,killed_runs training fp8 graphed)
GPU_PYTHON := $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(VENV)/installed-dev)),$(BIN)/python,$(PYTHON))
GPU_TESTS := $(LONG) $(filter-out $(LONG),$(wildcard tests/gpu/test_*.py))

.DEFAULT_GOAL := help
.PHONY: help speedrun check check-tests test test-slow test-all test-gpu fuzz lint format clean

help:
	@sed -n '/^$$/q; s/^# //p' Makefile

speedrun: $(VENV)/installed
	$(BIN)/nanorun speedrun

check: $(VENV)/installed-dev
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-tests lint

check-tests:
	$(PYTEST) -q $(CHECK)

test: lint
	$(PYTEST)

test-slow: $(VENV)/installed-dev
	$(PYTEST) -m slow

test-all: test
	@$(MAKE) --no-print-directory test-slow

test-gpu:
	@$(GPU_PYTHON) -c "import torch, pytest" 2>/dev/null || \
	  { echo "$(GPU_PYTHON) has no torch or no pytest: run make test once, or say make test-gpu PYTHON=..."; exit 2; }
	@$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) --output-sync=target $(GPU_TESTS:%=%.gpu)

%.gpu:
	$(GPU_PYTHON) -m pytest $* || test $$? -eq 5  # 5: nothing in it for this machine

# Some 20 minutes on one core for the default; SEED chooses other inputs.
COUNT ?= 40000
SEED  ?= 0
fuzz: $(VENV)/installed-dev
	$(BIN)/python tests/fuzz/fuzzer.py --count $(COUNT) --seed $(SEED)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("nanorun needs Python 3.11 or newer and $(PYTHON) is " + sys.version.split()[0] + ": name another with make PYTHON=python3.12 ...")'
	@echo "creating $(VENV) and installing nanorun into it (a minute or two, once)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e '.[serve]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e '.[dev]'
	@# a CPU build of torch brings no Triton; with it, the kernels' tests run through its interpreter
	@$(BIN)/python -c 'import triton' 2>/dev/null || \
		$(PIP) --no-deps 'triton==3.6.0; platform_system == "Linux" and platform_machine == "x86_64"'
	@touch $@ $(VENV)/installed
