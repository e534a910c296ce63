# Every target sets up its own virtual environment first; once that stands, set-up is a no-op.
#   make conformance            the main job          make test        lint, then the tests
#   make selftest               the checks themselves, against a catalogue of known faults
#   make PYTHON=python3.12 ...  another interpreter   make VENV=DIR    another place for the environment
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv

PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CONSTRAINTS := constraints/python$(PYTHON_VERSION).txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(PYTHON_VERSION)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: setup conformance selftest test test-slow lint mutation mutation-impl clean

setup: $(STAMP)

# --clear: an environment of another interpreter, or a half-made one, is no environment.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) pip setuptools
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

$(CONSTRAINTS):
	@echo "halocheck has no $(CONSTRAINTS): supported are $(patsubst constraints/%.txt,%,$(wildcard constraints/*.txt))" >&2; exit 2

conformance: setup
	$(BIN)/halocheck run

selftest: setup
	$(BIN)/halocheck selftest

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# The oracle and the halo plan are what every verdict rests on: every branch of them is run.
# Our own plugin is left out: it would import the oracle before its coverage is measured.
test: lint
	$(BIN)/pytest -p no:halocheck -n auto --cov=oracle --cov=impl --cov-report=
	$(BIN)/coverage report --include='oracle/*,impl/exchange.py' --show-missing --skip-covered --fail-under=100

# What takes minutes, all five TPU generations among it: some 175 tests and, by its parts, about an hour of CPU time.
test-slow: setup
	$(BIN)/pytest -n auto -m slow

# Changes the oracle in thousands of small ways, one at a time, and runs its tests on each: hours.
mutation: setup
	$(PIP) --no-build-isolation --editable '.[mutation]'
	$(BIN)/mutmut run
	$(BIN)/mutmut results

# Changes the implementations in some 700 small ways, one at a time, and puts each to the checks: hours.
mutation-impl: setup
	$(BIN)/python bench/mutate_impl.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
