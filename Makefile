# `make demo` and `make test` work on a fresh machine with python3 and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.demo-installed
JOBS   ?= 2
MINUTES ?= 10

# Examples of one document share their names, so that a file stays on one worker: loadfile. The
# longest files come first (tests/conftest.py), and are not put in another order.
PYTEST := $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-gpu soak lint format types imports docs figures results bench build clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv with the package, its extras and the tools

# Both stamps are older than the requirements or the pinned versions when these change: it installs again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
		{ echo "steppe needs Python 3.11 to 3.14, and $(PYTHON) is $$($(PYTHON) -V 2>&1): try make PYTHON=python3.13" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) cannot create a virtual environment: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

PIP := $(BIN)/pip install --disable-pip-version-check --quiet -c constraints.txt

$(STAMP): pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) -e '.[dg,dev]'
	@touch $@ $(DEMO_STAMP)

# What the demo needs, and nothing else: half as many packages.
$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) -e '.[dg]'
	@touch $@

demo: $(DEMO_STAMP) ## run the demo (minutes on a laptop CPU)
	$(BIN)/steppe demo

test: $(STAMP) ## run the tests, except those marked slow or gpu
	$(PYTEST)

test-all: $(STAMP) ## run every test; those marked gpu skip without CUDA
	$(PYTEST) -m ""

test-gpu: $(STAMP) ## run the tests marked gpu; fails without CUDA
	$(BIN)/pytest -m gpu tests

soak: $(STAMP) ## kill and fail commands at their file operations for MINUTES=10; needs cc
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --jobs $(JOBS)

lint: $(STAMP) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## fix style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## check types
	$(BIN)/mypy

imports: $(STAMP) ## check that imports only go down the layers
	$(BIN)/lint-imports

docs: $(STAMP) ## build the documentation into site/
	@# not --quiet, which also hides the warnings that --strict counts
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

figures: $(STAMP) ## draw the figures of the documentation again (minutes)
	$(BIN)/python docs/figures.py

results: $(STAMP) ## make the tables of published results from their records again
	$(BIN)/python docs/results/publish.py
	$(BIN)/python docs/defaults.py
	$(BIN)/python docs/algorithms.py
	$(BIN)/python docs/advise.py
	for study in digits doodles; do $(BIN)/steppe study report docs/results/studies/$$study --format markdown --out docs/results/studies/$$study/report.md; done

bench: $(STAMP) ## measure the optimizers; benchmarks/README.md lists the other measurements
	$(BIN)/python benchmarks/optim.py

build: $(STAMP) ## build the wheel and the source distribution into dist/
	$(BIN)/python -m build

clean: ## remove what the other targets made, except .venv
	rm -rf build dist site .coverage htmlcov .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests docs benchmarks examples -name __pycache__ -type d -exec rm -rf {} +
