# `make train` and `make test` set up .venv by themselves; PYTHON and VENV choose another interpreter or folder, ARGS adds arguments.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

RUN := $(VENV)/bin/python
# Names the set-up by its inputs: a fresh checkout of the same files needs no new installation, whatever their times.
STAMP := $(VENV)/set-up-$(shell { $(PYTHON) --version; cat pyproject.toml constraints.txt Makefile; } 2>&1 | cksum | cut -d ' ' -f 1)

export REEDLING_STARTED := $(shell date +%s)# from which train.py counts total_seconds
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor

.PHONY: setup train test lint figures
.DEFAULT_GOAL := setup

setup: $(STAMP)
	@echo "$(VENV) is ready"

train: $(STAMP)
	@$(RUN) train.py +experiment=digits $(ARGS)

test: lint
	@# one process more than two cores: tests of several processes wait for each other; files in their order, else those of few long tests come last
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP)
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

# The picture of the README, from the event files of RUN_DIR.
figures: $(STAMP)
	@$(RUN) -m training.figures $(or $(RUN_DIR),$(error make figures RUN_DIR=runs/digits)) docs/curves.png

# Without an NVIDIA driver the tested torch, which may be a CPU build; with one, the CUDA build that is there or the newest.
$(STAMP):
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Reedling needs Python 3.11 or newer and $(PYTHON) is \
	%d.%d: name another one, as in `make setup PYTHON=python3.12`" % v[:2])'
	@test "$$($(RUN) --version 2>&1)" = "$$($(PYTHON) --version 2>&1)" || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV), once: a few minutes"
	@$(RUN) -m pip install --quiet $$(command -v nvidia-smi > /dev/null && echo 'torch>=2.11' || echo torch==2.13.0 triton==3.7.1) -c constraints.txt
	@$(RUN) -m pip install --quiet --editable '.[dev,parity]' -c constraints.txt
	@command -v nvidia-smi > /dev/null || $(RUN) -m kernels.native
	@rm -f $(VENV)/set-up-*
	@touch $@
