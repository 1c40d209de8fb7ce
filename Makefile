# `make demo` and `make test` do all their set-up themselves, in .venv. `make trainers` adds Lightning, Hugging
# Face, Keras and the rest that adambs.integrations speaks to; without them their tests are skipped.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types tests trainers docs package lowest bench format clean

demo: .venv/installed
	$(BIN)/adambs demo

test: lint types tests

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

tests: .venv/installed
	$(BIN)/pytest -n 2 --dist loadfile

package: .venv/installed
	$(BIN)/python .ci/package.py

# The lowest versions that pyproject.toml claims, in an environment of their own. Old libraries call what newer ones deprecate.
lowest: .lowest/installed
	.lowest/bin/pytest -q -W ignore::DeprecationWarning tests --ignore tests/test_site.py --ignore tests/test_docs.py

.lowest/installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv .lowest
	.lowest/bin/pip install --quiet -c constraints-lowest.txt -e ".[lab]" pytest hypothesis selenium torchdata
	@touch $@

docs: .venv/installed
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -d docs/_build/doctrees docs docs/_build/html
	$(BIN)/sphinx-build --quiet --fail-on-warning -b doctest -d docs/_build/doctrees docs docs/_build/doctest
	@echo "The site: docs/_build/html/index.html"

trainers: .venv/trainers

.venv/trainers: .venv/installed
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev,trainers]"
	@touch $@

bench: .venv/installed
	$(BIN)/pip install --quiet -c constraints.txt -e ".[bench]"
	$(BIN)/adambs bench

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "adambs needs Python 3.11 or later; say which: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf .venv .lowest demo docs/_build docs/built .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
