# make lab | demo | test | bench-engine.  Everything installs into ./.venv.
PYTHON ?= python3
BIN := .venv/bin
NOTEBOOK := notebooks/01_quickstart.ipynb
.DEFAULT_GOAL := help
.PHONY: help lab demo test lint browser weights bench-engine clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

lab: weights  ## JupyterLab on the quickstart notebook
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(NOTEBOOK)

demo: .venv/lab.stamp  ## the quickstart without a browser; prints what its cells print
	@$(BIN)/python -u notebooks/demo.py $(NOTEBOOK)

test: .venv/test.stamp browser lint  ## install what the tests need, then run them all
	$(BIN)/python -m pytest

lint: .venv/test.stamp  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy mlcrouter_nb

bench-engine: .venv/test.stamp  ## the CPU engine's speed
	$(BIN)/python -m tests.bench.bench_engine

weights: .venv/lab.stamp
	@$(BIN)/python -m mlcrouter_nb.models

# The browser tests are skipped, by name, where no Chromium can be had.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing Debian's chromium for the browser tests ..."; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	else echo "No Chromium found: the browser tests will be skipped."; fi

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "mlcrouter_nb needs Python 3.11 or newer; name one with: make PYTHON=python3.12"; exit 2; }
	@echo "Making .venv with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv .venv

.venv/lab.stamp: pyproject.toml | .venv/bin/python
	@echo "Installing mlcrouter_nb[cpu,lab] into .venv (one to three minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,lab]'
	@touch $@

.venv/test.stamp: pyproject.toml | .venv/bin/python
	@echo "Installing mlcrouter_nb[cpu,lab,pandas,test] into .venv (one to three minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,lab,pandas,test]'
	@touch $@ .venv/lab.stamp

clean:  ## remove .venv and what the tools left; the cache of weights and kernels stays
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
