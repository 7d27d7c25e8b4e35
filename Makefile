# Each target makes its own environment: .venv, from requirements.txt, with the package installed editable.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# One thread a process: the demo starts four of them, and torchrun would warn about the default.
demo: export OMP_NUM_THREADS = 1
check: export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1

.DEFAULT_GOAL := help
.PHONY: help demo test check bench clean
.DELETE_ON_ERROR:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s  %s\n", $$1, $$2 }' Makefile

demo: .venv/.ready ## train a tiny language model on 4 processes and check it against one
	@$(BIN)/torchrun --standalone --nproc-per-node 4 examples/train_tiny_lm.py --check

test: check ## check, then all tests, then the size of the package
	@echo "== pytest"
	@$(BIN)/python -m pytest
	@echo "== size"
	@$(BIN)/python tools/size_table.py

check: .venv/.ready ## lint, formatting and types
	@echo "== ruff check"
	@$(BIN)/ruff check --quiet
	@echo "== ruff format"
	@$(BIN)/ruff format --check --quiet || { echo "mend it with: $(BIN)/ruff format"; exit 1; }
	@echo "== pyright"
	@$(BIN)/pyright

bench: .venv/.ready ## measure attention; prints ratios from one run and writes docs/benchmarks.md
	@$(BIN)/python benchmarks/attention.py
	@$(BIN)/python benchmarks/report.py

clean: ## remove .venv, caches and build output
	@rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) else f"$(PYTHON) is Python {v}; usp needs 3.11 or newer: make PYTHON=python3.11")'
	@echo "== .venv (the first time takes a few minutes)"
	@$(PYTHON) -m venv .venv
	@$(PIP) install -r requirements.txt
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
