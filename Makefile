# make demo and make test set up whatever is missing; both work offline after the first time.

PYTHON ?= python3
# The index to take PyTorch from; empty: pip's own (on Linux its default build brings CUDA, 5 GB).
TORCH_INDEX ?=

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test check prove book serve figures generated book-next lint types kernel-table bench-peers gpu clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## make the virtual environment and install the pinned packages

$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "minivllm needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	    "Name another one: make PYTHON=python3.12 demo" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "Installing packages into $(VENV) (once; a few minutes) ..."
	@# Without what it depends on: that comes from the usual index, at the pinned versions.
	@$(if $(TORCH_INDEX),$(PY) -m pip install --quiet --disable-pip-version-check --no-deps \
	  --index-url "$(TORCH_INDEX)" --constraint constraints.txt torch)
	@$(PY) -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev,book]'
	@touch $@

demo: $(READY)  ## run the finished engine on a real model
	@$(PY) -m minivllm demo

test: $(READY) lint types  ## run every check and every test (about 17 minutes on 2 cores)
	@$(PY) -m minivllm download
	$(PY) -m pytest

check: $(READY) lint types  ## the fast part, without a model and without kernels
	$(PY) -m pytest -m "not model and not kernels and not site"

prove: $(READY)  ## the long proof: 100,000 random workloads (about 12 minutes on 2 cores)
	$(PY) -m tests.proof

kernel-table: $(READY)  ## compile all kernels for five GPUs: registers, spills, shared memory
	$(PY) -m benchmarks.kernel_table

bench-peers: $(READY)  ## compare with vLLM's CPU build and transformers (installs vLLM into .peers/, 3.4 GB; most of an hour)
	@mkdir -p build
	@TORCH_INDEX="$(TORCH_INDEX)" $(PY) -m benchmarks.peers --json build/peers.json

PART ?= tests
# The folder for its figures.
OUT ?= build
gpu:  ## on a machine with a GPU and PyTorch: make gpu PYTHON=python3 PART=tests|align|bench|tune
	@$(PYTHON) -m benchmarks.gpu $(PART) --out "$(OUT)/gpu-$(PART).json"

book: $(READY) generated  ## build the book strictly into site/
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

serve: $(READY) generated  ## show the book with live reload
	@# --livereload is the default that mkdocs 1.6 loses with click 8.3 and newer.
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve --livereload --watch build/book

# A production trace in the Mooncake format; without one its figure stays as it is.
TRACE ?=
figures: $(READY)  ## measure and draw the book's figures again (half an hour, best on an idle machine; TRACE=FILE)
	$(PY) -m book.figures
	$(PY) -m chapters.ch05_model_runner.measure > docs/figures/ch05-measure.txt
	$(PY) -m chapters.ch07_suffix_prefill.measure > docs/figures/ch07-measure.txt
	$(PY) -m benchmarks.core --rounds 30 > docs/figures/when-core.txt
	$(PY) -m benchmarks.cpu_linear > docs/figures/cpu-linear.txt
	$(PY) -m benchmarks.cpu_step > docs/figures/cpu-step.txt
	$(PY) -m benchmarks.cpu_step --batch 1 --new 64 --lines 6 > docs/figures/cpu-step-one.txt
	$(PY) -m benchmarks.cpu_step --batch 1 --new 64 --lines 6 --by-parts \
	  > docs/figures/cpu-step-by-parts.txt
	$(PY) -m benchmarks.cpu_attention > docs/figures/cpu-attention.txt
	$(PY) -m benchmarks.host_step > docs/figures/host-step.txt
	$(PY) -m benchmarks.host_launches > docs/figures/host-launches.txt
	$(PY) -m benchmarks.kernel_table --select widest --kernel prefill --tile 64,32,8,5 \
	  > docs/figures/kernel-start.txt
	$(PY) -m benchmarks.kernel_table --select defaults --kernel prefill --head 128 --tile 128,64,8,5 \
	  > docs/figures/kernel-spills.txt
	$(PY) -m benchmarks.kernel_table --select defaults --kernel prefill decode split --head 128 \
	  > docs/figures/kernel-room.txt
	$(PY) -m benchmarks.kernel_counts --target sm_90 --kernel decode prefill split \
	  > docs/figures/kernel-counts.txt
	$(PY) -m benchmarks.kernel_counts --target sm_90 --kernel split_prefill \
	  --tile 64,64,8,5 64,64,4,5 64,32,4,5 > docs/figures/kernel-rest.txt
	$(PY) -m benchmarks.kernel_counts --head 64 --target sm_80 --kernel prefill \
	  --tile 128,64,8,5 128,32,4,5 > docs/figures/kernel-turns.txt
	$(PY) -m benchmarks.pressure --plot docs/figures > docs/figures/pressure-chat.txt
	$(if $(TRACE),$(PY) -m benchmarks.pressure --trace $(TRACE) --plot docs/figures \
	  > docs/figures/pressure-trace.txt)
	$(PY) -m book.greedy

generated: $(READY)
	@$(PY) -m book

# Zensical is mkdocs-material's announced successor: the same mkdocs.yml must do for it.
NEXT := build/zensical
book-next: $(READY) generated  ## build the same book with Zensical, in its own environment
	@test -x $(NEXT)/bin/python || $(PYTHON) -m venv $(NEXT)
	@$(NEXT)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt zensical latex2mathml
	@$(NEXT)/bin/python -m zensical build --strict --clean

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m mypy

clean:  ## remove the virtual environment and what tools left behind
	rm -rf $(VENV) build site docs/generated docs/reference .cache *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
