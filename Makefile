.PHONY: help install demo test lint types contracts check clean
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

help:  ## say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

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
	rm -rf .venv .tools .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
