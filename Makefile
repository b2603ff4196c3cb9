# `make demo` and `make test` need Python 3.11 and nothing else: the first run makes .venv with the tested versions.
#
# On Linux, PyPI's torch brings the CUDA libraries (several GB). The smaller CPU build comes from torch's own index:
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make venv
# Another interpreter: make venv PYTHON=python3.12

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: help venv demo test test-slow gpu lint dist bench soak docs screenshots map clean

help:
	@echo "make venv | demo | test | test-slow | gpu | lint | dist | bench (as root) | soak | docs | screenshots | map | clean"

venv: $(STAMP)

# Torch goes first and fixes its version for all that follows. It brings setuptools, so that the package itself is
# built with the tested one (no build isolation).
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools torch==2.13.0
	$(INSTALL) --no-build-isolation -e '.[test,demo,accelerate]'
	@touch $@

demo: venv
	$(BIN)/python examples/demo.py

# Everything that a change has to pass. Tests start processes, each of which would else compile the package again.
test test-slow: export PYTHONDONTWRITEBYTECODE =
test: venv
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not (slow or gpu)"

# Many seeds, kill loops, launchers, recipes, limits of resources, in order of value: twenty minutes on two idle
# cores, or `BUDGET=600` seconds, after which what was left out is named.
test-slow: venv
	$(BIN)/python tests/slow.py $(if $(BUDGET),--budget $(BUDGET))

# Proves the GPU paths on this machine, offline and from the source tree; with the tested versions if `make venv` made
# them, else with those of PYTHON. `make gpu BUDGET=480` runs what fits in so many seconds, in order of value. Without a
# GPU, the same code runs on CPUs at a small size.
gpu:
	PYTHONPATH=. $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tests/gpu/main.py \
		$(if $(BUDGET),--budget $(BUDGET))

lint: venv
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# The source distribution, and the wheel that is built from it. Both are checked: what is in them, and how the wheel works
# in an environment that has the required packages only. Needs no network.
dist: venv
	$(BIN)/python tests/distributions.py dist

# Unequal workers are made by limiting the share of a core that a process gets, for which one must be root.
bench: venv
	@[ "$$(id -u)" = 0 ] || { echo "make bench limits the workers' share of a core and must run as root." >&2; exit 1; }
	$(BIN)/python benchmarks/solver.py
	$(BIN)/python benchmarks/decide.py
	$(BIN)/python benchmarks/closed_loop.py
	$(BIN)/python benchmarks/lengths.py
	$(BIN)/python benchmarks/balance.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/recording.py
	$(BIN)/python benchmarks/recording.py --rounds
	$(BIN)/python benchmarks/adaptive.py
	$(BIN)/python benchmarks/compression.py
	$(BIN)/python benchmarks/convergence.py
	$(BIN)/python benchmarks/wan.py
	$(BIN)/python benchmarks/wan.py --trace
	$(BIN)/python benchmarks/priority.py
	$(BIN)/python benchmarks/hierarchy.py
	for command in shapes grid curves scaling confirm; do \
		$(BIN)/python benchmarks/papers/adaptive_sgd.py $$command || exit; done

# An hour of the demo's training, while speeds drift and workers fail (benchmarks/soak.py). Nothing else should run.
soak: venv
	$(BIN)/python benchmarks/soak.py

# The pages are in docs/_build/html, once links, names, figures and made tables are checked. Needs no network once the
# tools are installed.
docs: venv
	$(INSTALL) --no-build-isolation -e '.[docs]'
	$(BIN)/python docs/check.py
	$(BIN)/python -m sphinx -W --keep-going -d docs/_build/doctrees docs docs/_build/html

# Pictures of the pages in docs/_build/screenshots, on a large and a small screen; needs Chromium.
screenshots: docs
	$(BIN)/python docs/screenshots.py

# Draws the packages from their imports, and writes the tables of modules, the record, evidence and reliability; `make
# docs` fails when it is due.
map: venv
	$(BIN)/python docs/figures/packages.py
	for page in modules run_record evidence reliability; do $(BIN)/python docs/$$page.py || exit; done

clean:
	rm -rf $(VENV) build dist docs/_build docs/examples docs/reference .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
