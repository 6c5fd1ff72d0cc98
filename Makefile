# The README's commands. `make demo` and `make test` set everything up themselves.
#
#   PY=/path/to/python   use an environment that has a torch already (it keeps its torch) instead of .venv
PYTHON ?= python3
VENV := .venv
PY ?= $(VENV)/bin/python
# One stamp per interpreter: switching PY sets the other environment up too.
STAMP := build/setup-$(shell printf '%s' '$(PY)' | cksum | cut -d' ' -f1)
SOURCES := $(wildcard fastlayers/csrc/*.* fastlayers/csrc/*/*.*)
CPP := $(shell git ls-files 'fastlayers/csrc/**' 'tests/**' 'benchmarks/**' 'examples/**' 2>/dev/null | grep -E '\.(h|cpp|cu|cuh)$$')
PYTEST := $(PY) -m pytest -q -n 2
# The tests run in two processes on the two cores; more threads inside each would only fight over them.
test test-all: export OMP_NUM_THREADS := 1

.PHONY: help setup demo test test-all lint bench gpu cuda-check cuda-link sanitize clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## create .venv, install what is needed, build the extension

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): requirements-dev.txt pyproject.toml setup.py $(SOURCES) $(if $(filter $(VENV)/%,$(PY)),| $(VENV)/bin/python)
	@mkdir -p build
	@# An environment that brings its own torch keeps it; everything else is installed around it.
	grep -v '^torch==' requirements-dev.txt > build/requirements.txt
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install -q "$$(grep '^torch==' requirements-dev.txt)"
	$(PY) -m pip install -q -r build/requirements.txt
	$(PY) -m pip install -q --no-build-isolation --no-deps -e .
	@touch $@

demo: setup ## convert a trained TopoMAD, verify it, time it; writes demo_output/
	$(PY) -m examples.demo $(DEMO_ARGS)

test: setup ## all tests but the slow ones
	$(PYTEST) -m "not slow" $(TEST_ARGS)

test-all: setup ## all tests
	$(PYTEST) $(TEST_ARGS)

lint: setup ## ruff, mypy, clang-format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(if $(CPP),$(dir $(PY))clang-format --dry-run --Werror $(CPP))

bench: setup ## time LinearList against its peers
	$(PY) benchmarks/bench_linear_list.py $(BENCH_ARGS)

# On a GPU machine the environment is that machine's own: make gpu PY=python3
gpu: ## on a machine with a GPU, in 5 minutes: build, all tests, benchmarks, TopoMAD
	$(PY) benchmarks/gpu.py $(GPU_ARGS)

cuda-check: setup ## compile the CUDA kernels for all architectures; a warning or a spill fails (needs nvcc)
	$(PY) scripts/cuda_check.py

cuda-link: setup ## load the CUDA library into a CUDA build of torch, without a GPU (several GB)
	$(PY) scripts/cuda_link.py

clean: ## remove what was built (not .venv)
	rm -rf build dist demo_output *.egg-info fastlayers/*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
