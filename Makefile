.PHONY: help install demo test test-2.0 lint types contracts check clean
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
STAMP_20 := .venv-2.0/.installed

help:  ## say what there is
	@grep -hE '^[a-z0-9.-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

# uv needs neither ensurepip nor python3-venv; where it cannot be had, the standard library's venv serves.
$(STAMP): pyproject.toml
	@if $(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target .tools uv; then \
	  [ -x $(BIN)/python ] || .tools/bin/uv venv --quiet --python $(PYTHON) .venv; \
	  VIRTUAL_ENV=.venv .tools/bin/uv pip install --quiet -e '.[dev]'; \
	else \
	  [ -x $(BIN)/python ] || $(PYTHON) -m venv .venv; \
	  $(BIN)/python -m pip install --quiet -e '.[dev]'; \
	fi
	@touch $@

install: $(STAMP)  ## everything the project needs, into .venv

demo: $(STAMP)  ## orders invoiced exactly once while a worker is killed
	@$(BIN)/python -m examples.demo

test: $(STAMP)  ## the whole suite on a real PostgreSQL
	@$(BIN)/python -m pytest

# The whole suite again on the older line of SQLAlchemy, in an environment of its own.
$(STAMP_20): pyproject.toml $(STAMP)
	@if [ -x .tools/bin/uv ]; then \
	  [ -x .venv-2.0/bin/python ] || .tools/bin/uv venv --quiet --python $(PYTHON) .venv-2.0; \
	  VIRTUAL_ENV=.venv-2.0 .tools/bin/uv pip install --quiet -e '.[dev]' 'SQLAlchemy<2.1'; \
	else \
	  [ -x .venv-2.0/bin/python ] || $(PYTHON) -m venv .venv-2.0; \
	  .venv-2.0/bin/python -m pip install --quiet -e '.[dev]' 'SQLAlchemy<2.1'; \
	fi
	@touch $@

test-2.0: $(STAMP_20)  ## the whole suite on SQLAlchemy 2.0
	@.venv-2.0/bin/python -m pytest

lint: $(STAMP)  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy and pyright, both strict
	@$(BIN)/mypy
	@$(BIN)/pyright

contracts: $(STAMP)  ## the floors of docs/architecture.md
	@$(BIN)/lint-imports --no-cache

check: lint types contracts test  ## all of the above

clean:  ## remove what the targets made
	rm -rf .venv .venv-2.0 .tools .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
