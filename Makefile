# make book   execute the chapters whose sources changed, then build the pages into _build/html
# make test   the book, then every test; the browser tests run where a Chromium is found
# make lab    JupyterLab, chapters opening as notebooks
# make lint   ruff (sources and chapter cells), mypy, codespell, round trip of the chapters
# make bench  the table of ratios of results/benchmarks (15 minutes on a quiet machine)
# make clean  everything built; the virtual environment stays (make distclean removes it too)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
READY := .venv/.ready

# One thread a worker: two workers with two threads each are slower than two with one.
export OMP_NUM_THREADS ?= 1
export PYTHONPATH := $(CURDIR)/src

.PHONY: book test lab lint bench clean distclean

book: $(READY)
	@$(BIN)/python -m tools.execute --workers $(WORKERS)
	@$(BIN)/python -m tools.build

test: book
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup tests

lab: $(READY)
	@$(BIN)/jupytext-config set-default-viewer
	@$(BIN)/jupyter lab book/index.md

bench: $(READY)
	@$(BIN)/python -m benchmarks

lint: $(READY)
	@$(BIN)/ruff check src tests tools benchmarks book/_ext
	@$(BIN)/ruff format --check src tests tools benchmarks book/_ext
	@$(BIN)/mypy
	@$(BIN)/python -m tools.lint_chapters
	@$(BIN)/codespell book README.md CONTRIBUTING.md src tests tools benchmarks

$(READY): requirements.txt constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { echo "No virtual environment could be made. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing the pinned packages into .venv (minutes the first time)"
	@$(BIN)/pip install --quiet --requirement requirements.txt --constraint constraints.txt
	@$(BIN)/pip install --quiet --no-deps --editable .
	@touch $@

clean:
	@rm -rf build _build .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	@rm -rf .venv
