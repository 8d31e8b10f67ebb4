# `make demo` and `make test` need nothing but Python 3.11-3.13: they set up .venv themselves and are safe to repeat.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CONSTRAINT := $(VENV)/constraints.txt
TORCH_PIN := torch==2.13.0
WORKERS ?= auto

# True (exit 0) where a PyTorch that we support can be imported.
HAS_TORCH := import torch; v = tuple(map(int, torch.__version__.split(".")[:2])); raise SystemExit(not (2, 11) <= v <= (2, 13))
HAS_PYTHON := import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
SAY_TORCH := from importlib.metadata import version; print("torch==" + version("torch"))

# One thread per worker: the workers share the cores, and PyTorch would start one thread per core in each.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS)

.PHONY: help setup demo solutions test test-all check format clean

help:
	@echo "make demo      set up, then optimize the three founding models at a small batch and print the tables"
	@echo "make solutions write examples/solutions anew (a test compares them with what would be written)"
	@echo "make test      set up, then lint, types and tests (what CI runs)"
	@echo "make test-all  the same with the slow tests"
	@echo "make check     lint, formatting and types only"
	@echo "make format    put the sources in shape"
	@echo "make clean     remove .venv and every cache"

setup: $(STAMP)

# PyTorch first and by an exact pin: left to the resolver, it may bring gigabytes of a newer one.  The constraint then
# holds it in place while the rest is installed.  A supported PyTorch that is there already is used as it is.
$(STAMP): pyproject.toml
	@$(PYTHON) -c '$(HAS_PYTHON)' || { echo "Python 3.11, 3.12 or 3.13 is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	    if $(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null; then $(PYTHON) -m venv --clear --system-site-packages $(VENV); \
	    else $(PYTHON) -m venv --clear $(VENV); fi; \
	fi
	@$(PY) -c '$(HAS_TORCH)' 2>/dev/null || $(PY) -m pip install --no-input '$(TORCH_PIN)'
	@$(PY) -c '$(SAY_TORCH)' > $(CONSTRAINT)
	$(PY) -m pip install --no-input --quiet -c $(CONSTRAINT) -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(VENV)/bin/fusewright optimize examples/conv_avgpool_sigmoid_sum.py --batch 4
	$(VENV)/bin/fusewright optimize examples/conv3d_div_maxpool_gap_bias_sum.py --batch 4
	$(VENV)/bin/fusewright optimize examples/convtranspose_gap_bias_logsumexp.py --batch 2

FOUNDING := conv_avgpool_sigmoid_sum conv3d_div_maxpool_gap_bias_sum convtranspose_gap_bias_logsumexp

solutions: $(STAMP)
	for name in $(FOUNDING); do \
	    CUDA_VISIBLE_DEVICES= $(VENV)/bin/fusewright optimize examples/$$name.py -o examples/solutions/$$name.py \
	        --target cuda --force || exit 1; \
	done
	$(VENV)/bin/fusewright optimize examples/$(word 1,$(FOUNDING)).py -o examples/solutions/$(word 1,$(FOUNDING))_cpu.py \
	    --target cpu --no-measure --force

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: check
	$(PYTEST)

test-all: check
	$(PYTEST) -m 'not gpu'

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
