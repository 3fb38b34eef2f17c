# make demo   the main job: the same problems with and without compression, in a small KV pool
# make test   lint, type check and tests
# make venv   the environment alone: .venv with pinned dependencies and the compiled extension

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/ready
SOURCES := $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu csrc/*/*.cuh)

.PHONY: venv demo test lint clean

venv: $(READY)

$(READY): constraints.txt pyproject.toml setup.py $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt torch setuptools wheel
	@echo "Building the operators: for the CPU, and for CUDA if there is an nvcc"
	$(VENV)/bin/pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev]'
	touch $@

demo: venv
	$(VENV)/bin/python -m benchmarks.demo $(DEMO_ARGUMENTS)

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

test: lint
	$(VENV)/bin/python -m pytest -n auto --dist loadfile

clean:
	rm -rf $(VENV) build dist *.egg-info kvllm/*.so
