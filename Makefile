# Two commands do all the set-up on a machine that has Python, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# TORCH_INDEX is a package index with CPU builds of torch, which pip then prefers; without one, torch comes from where pip
# looks anyway, which on Linux may be the build for CUDA: `make demo TORCH_INDEX=https://...`
TORCH_INDEX ?=
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo test check lint types unit docs clean

demo: $(VENV)/.installed
	$(BIN)/memfit demo

test: lint types unit

check: lint types

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/mypy

unit: $(VENV)/.installed-dev
	$(BIN)/pytest --numprocesses=auto

# The stamps make a second call install nothing; a change of the pins or of pyproject.toml installs again.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	touch $@

# The site is built strictly, and without a network: warnings are errors. Sources are read, not imported.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) site
