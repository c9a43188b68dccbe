# The project's commands. Each does the set-up it needs.
PYTHON ?= python3
BIN := .venv/bin
# --strict: a broken link or anchor, or a page that is in no menu, is an error. The variable silences an advertisement.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: setup demo demo-cluster check docs test soak bench clean help
help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# One stamp, so that a second `make` starts at once; a changed dependency list sets up again.
.venv/.ready: pyproject.toml constraints.txt setup.py src/dure/comm/shm_barrier.c \
    src/dure/comm/reduce/treesum.c src/dure/device/copying.c src/dure/comm/backend/collectives.c
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

setup: .venv/.ready  ## make .venv with everything in it

demo: setup  ## draw 400 photos, train on 4 ranks, print what happened
	$(BIN)/dure demo

demo-cluster: setup  ## two nodes, an image, shared storage: the documents' picture on this machine (root)
	tools/system-packages
	tools/demo-cluster

check: setup  ## format, lint, types, import layers, dead code, spelling, the documentation and its links
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture
	$(BIN)/codespell
	$(MKDOCS) --quiet --site-dir build/site-check
	$(BIN)/python -m pytest -q tests/unit/test_docs.py

docs: setup  ## the documentation as a site, in site/: open site/index.html; needs no network
	$(MKDOCS)

test: setup  ## all tests but the long ones, on several workers; then their slowest, and one line of counts
	tools/system-packages
	$(BIN)/python tools/run-tests

soak: setup  ## the long tests too
	tools/system-packages
	$(BIN)/python -m pytest -m soak

bench: setup  ## print the figures: starting ranks, one all-reduce, step time, the backend, loading, checkpoints, recovery
	$(BIN)/dure bench start
	$(BIN)/dure bench reduce
	$(BIN)/dure bench step
	$(BIN)/dure bench backend
	$(BIN)/dure bench load
	$(BIN)/dure bench checkpoint
	$(BIN)/dure bench recover
	$(BIN)/dure bench receipt
	$(BIN)/dure bench audit
	$(BIN)/dure bench page

clean:  ## remove what the commands above made
	rm -rf .venv runs shared build dist site
