# Two commands do all the set-up on a machine that has Python, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# TORCH_INDEX is a package index with CPU builds of torch for every Python, which pip then prefers: on PyPI, torch for Linux is
# the build for CUDA, of half a GB and more in libraries. Where the index does not answer, pip looks only where it always does.
# `make demo TORCH_INDEX=` installs what PyPI has.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ANSWERS := import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=10)
PIP = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	$(if $(TORCH_INDEX),$(shell $(PYTHON) -c '$(ANSWERS)' $(TORCH_INDEX) 2>/dev/null && echo --extra-index-url $(TORCH_INDEX)))

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

# axolotl pins other versions of what the tests use, and needs packages for GPUs. It runs without either.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps axolotl axolotl-contribs-lgpl axolotl-contribs-mit
	touch $@

# The site is built strictly, and without a network: warnings are errors. Sources are read, not imported. No page may load
# anything from another host, so that the site works offline.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	! grep --recursive --files-with-matches --include='*.html' '<\(script\|link\|img\)[^>]*\(src\|href\)="\?https\?:' site

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) site
