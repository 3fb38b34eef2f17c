# make demo   the main job: the same problems with and without compression, in a small KV pool
# make test   lint, type check and tests
# make test-long   the same with every case and twenty times the examples
# make simulate   the engine under timed traffic and failing parts, on a virtual clock (SECONDS=600, FIRST_SEED=0, PROCESSES=2)
# make test-sanitizers   the operators for CPUs, up to AVX2, under ASan and UBSan, then under TSan: half an hour
# make clients  .venv-clients: other people's clients of the server, which the tests use if they are there
# make models  models/: two real models, which tests use if they are there (MODELS=smollm2 or gemma3: one of them)
# make venv   the environment alone: .venv with pinned dependencies and the compiled extension
# make wheel  dist/: one wheel for every Python from 3.11 and every torch from 2.11
# make page   kvllm/serving/page/: the server's page, from page/ (needs Node.js)
# make docs   site/: the pages of docs/ and the API reference

PYTHON ?= python3
VENV := .venv
DOCS_VENV := .venv-docs
CLIENTS_VENV := .venv-clients
READY := $(VENV)/ready
SOURCES := $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu csrc/*/*.cuh)

.PHONY: venv clients models demo test test-long test-sanitizers simulate lint wheel page docs clean

venv: $(READY)

$(READY): constraints.txt pyproject.toml setup.py $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing PyTorch and the other dependencies: some minutes"
	$(VENV)/bin/pip install --quiet -c constraints.txt torch setuptools wheel
	@echo "Building the operators: for the CPU, and for CUDA if there is an nvcc"
	$(VENV)/bin/pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev]'
	touch $@

# Beside the packages of .venv, which it can import, too: torch and transformers are there already.
clients: $(CLIENTS_VENV)/ready

$(CLIENTS_VENV)/ready: tests/serving/clients/requirements.txt $(READY)
	$(VENV)/bin/python -m venv --clear $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/pip install --quiet --no-deps --no-compile -r tests/serving/clients/requirements.txt
	$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(CLIENTS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvllm.pth
	touch $@

models: venv
	$(VENV)/bin/python -m benchmarks.fetch_models $(MODELS)

demo: venv
	$(VENV)/bin/python -m benchmarks.demo $(DEMO_ARGUMENTS)

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/clang-format --dry-run --Werror $(SOURCES) tests/kernels/*.cpp

test: lint
	$(VENV)/bin/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder --durations 40

test-long: lint
	$(VENV)/bin/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder --long

simulate: venv
	$(VENV)/bin/python -m tests.deterministic $(if $(SECONDS),--seconds $(SECONDS)) $(if $(FIRST_SEED),--first-seed $(FIRST_SEED)) \
		$(if $(PROCESSES),--processes $(PROCESSES))

OPERATOR_TESTS := $(patsubst %,tests/kernels/test_%.py,cpu_ops event_ops gated_delta instruction_sets threads) \
	tests/core/test_engine.py

# build/asan and build/tsan get the package with operators of their own. Python is built for neither: the runtime is
# loaded before it, what it leaks is its own, and races inside of PyTorch and OpenMP are not looked for. The test
# of forks is left out: TSan takes a child's new threads for its parent's, whose stacks they get, and ends it ("dup
# thread with used id"); so is that of unknown instruction sets, which expects the list of all.
test-sanitizers: venv
	set -e; for kind in asan=address,undefined tsan=thread; do name=$${kind%%=*}; \
		KVLLM_SANITIZERS=$${kind#*=} $(VENV)/bin/python setup.py --quiet build \
			--build-lib build/$$name --build-temp build/$$name-objects; \
		LD_PRELOAD="$$($(CXX) -print-file-name=lib$$name.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		TSAN_OPTIONS="halt_on_error=1 die_after_fork=0 suppressions=$(CURDIR)/tests/kernels/tsan.supp" \
		PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/$$name:$(CURDIR) OMP_NUM_THREADS=2 \
			$(VENV)/bin/python -m pytest -q --capture=sys -o pythonpath=build/$$name --import-mode=append $(OPERATOR_TESTS) -k "not avx512 and not amx and not of_forks and not unknown_instruction_set"; \
	done

wheel: venv
	rm -rf build  # files that were moved since would be packed, too
	$(VENV)/bin/pip wheel --quiet . --no-build-isolation --no-deps --wheel-dir dist

page:
	cd page && npm ci --no-audit --no-fund --ignore-scripts && npm run check && npm run build

docs: $(DOCS_VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

# Without torch and without a compiler: the reference is read from the sources.
$(DOCS_VENV)/ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet -c constraints.txt $$($(PYTHON) -c \
		'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(CLIENTS_VENV) build dist site *.egg-info kvllm/*.so page/node_modules
