# Every target sets itself up in .venv, once; PYTHON=python3.12 chooses the interpreter it is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install demo test lint check bench tiny docs

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

install: $(READY)  ## set up .venv: the package (editable) and everything its tests need

demo: $(READY)  ## ask the embedded pair one fact, forwards and backwards; pictures in demo/
	$(BIN)/diffusion-lens demo

test: $(READY)  ## run the tests (CPU, offline)
	$(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test  ## ruff, mypy --strict, then the tests: what a change must pass

bench: $(READY)  ## run every script of benchmarks/
	@set -e; for script in $(sort $(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python "$$script"; done

tiny: $(READY)  ## train the embedded pair again (about a quarter of an hour)
	$(BIN)/python -m diffusion_lens.tiny_pair --out diffusion_lens/assets/tiny

docs: $(READY)  ## build the site, warnings as errors, offline; open docs/_build/index.html
	$(BIN)/python -m sphinx -E -W --keep-going -n -q -b html docs docs/_build

# torch comes first and alone: whatever else asks for a torch then finds the pinned one there.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("Python 3.10 or newer is needed, and this is %d.%d; try: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@
