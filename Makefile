# Each target sets up a virtual environment (.venv) by itself, given Python 3.11 or newer:
#   make gpt        train a byte-level GPT with an automatic plan on 8 virtual host devices
#   make gpt-ray    the same as a pipeline of 2 stages on a local Ray, 2 workers with 4 CPU devices each
#   make quick      most of the tests that need no devices, in less than two minutes
#   make test       linters, types, import contracts, tests (about 15 minutes on 2 cores)
#   make test-all   the same with every combination (ARGS="FILE ..." for some files alone)
#   make ecosystem  train steps written with other people's packages, in a virtual environment of their own (Python 3.11)
#   make docs       build the documentation into docs/_build/html
#   make lint       linters, types and import contracts alone
#   make soak       5,000 of JAX's own cases and 2,000 fuzzed steps (ARGS="--cases N --steps N --seed N")
#   make bench-X    benchmarks/X.py (ARGS="..." is passed on)
# PYTHON chooses the interpreter: make test PYTHON=python3.12

PYTHON ?= python3
ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin

TAG := $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2] if sys.version_info >= (3, 11) else "old")' 2>/dev/null)
ifeq ($(TAG),)
$(error cannot run $(PYTHON); set PYTHON to a Python 3.11 or newer)
endif
ifeq ($(TAG),old)
$(error autopar needs Python 3.11 or newer and $(PYTHON) is older; set PYTHON, as in: make test PYTHON=python3.12)
endif
CONSTRAINTS := $(if $(filter py311,$(TAG)),constraints/py311-jax0.10.txt,constraints/py312-jax0.12.txt)
READY := $(VENV)/ready-$(TAG)
PYTEST := $(BIN)/python -m pytest
ECOSYSTEM := .venv-ecosystem

.PHONY: help docs venv gpt gpt-ray quick test test-all ecosystem soak lint format hooks clean
.DEFAULT_GOAL := help

help:
	@sed -n '2,12p' Makefile | cut -c3-

$(READY): pyproject.toml $(CONSTRAINTS)
	@test ! -d $(VENV) || ls $(VENV)/ready-* > /dev/null 2>&1 || { echo "$(VENV) is not from here, and would be removed: name another folder, as in: make VENV=.venv-make $(MAKECMDGOALS)"; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[checkpoint,docs,examples,ray,solver,test]'
	touch $@

venv: $(READY)

gpt: $(READY)
	$(BIN)/python -m examples.gpt.train $(ARGS)

gpt-ray: $(READY)
	$(BIN)/python -m examples.gpt.train_ray $(ARGS)

docs: $(READY)
	$(BIN)/python -m sphinx -q -W --keep-going -b $(or $(ARGS),html) docs docs/_build/$(or $(ARGS),html)  # ARGS=linkcheck

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

quick: $(READY)
	$(PYTEST) tests --ignore=tests/cpu8 --ignore=tests/ray --ignore=tests/ecosystem -m "not full and not slow" -n 2 --dist loadgroup

test: lint
	$(PYTEST) tests --ignore=tests/ecosystem -m "not full" -n 4 --dist loadgroup  # tests on Ray wait much

test-all: lint
	$(PYTEST) -p tests.table --table docs/test-all-$(TAG).md $(or $(ARGS),tests) --ignore=tests/ecosystem -n 3 --dist loadgroup

$(ECOSYSTEM)/ready: pyproject.toml constraints/py311-ecosystem.txt
	@test $(TAG) = py311 || { echo "the ecosystem's packages are pinned for Python 3.11: make ecosystem PYTHON=python3.11"; exit 1; }
	rm -rf $(ECOSYSTEM)
	$(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints/py311-ecosystem.txt -e '.[ecosystem,solver]'
	touch $@

ecosystem: $(ECOSYSTEM)/ready
	$(ECOSYSTEM)/bin/python -m pytest -p tests.ecosystem.table --ecosystem-table docs/ecosystem-$(TAG).md tests/ecosystem -n 2 $(ARGS)

soak: $(READY)
	$(BIN)/python -m tests.soak --table docs/soak-$(TAG).md $(ARGS)

bench-%: $(READY)
	$(BIN)/python -m benchmarks.$* $(ARGS)

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

hooks: $(READY)
	@test ! -e .git/hooks/pre-commit || { echo ".git/hooks/pre-commit exists; it stays as it is"; exit 1; }
	printf '#!/bin/sh\nexec make lint\n' > .git/hooks/pre-commit
	chmod +x .git/hooks/pre-commit

clean:
	rm -rf $(VENV) $(ECOSYSTEM)
