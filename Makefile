# tieredkv: `make setup`, `make demo`, `make test`; each starts from a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# Without a GPU: the torch release that has a CPU build. Where pip would take a CUDA build of it,
# set TORCH_INDEX_URL to the index that holds the CPU builds.
CPU_TORCH := torch==2.13.0

BROWSER := $(shell which chromium-headless-shell chromium chromium-browser google-chrome 2>/dev/null | head -1)
CLIENTS := .venv-clients
VLLM := .venv-vllm
# With a GPU, shapes and a length that leave something to save.
DEMO := $(if $(HAS_GPU),random:qwen2.5-1.5b --prefix-tokens 98304,tiny-random --prefix-tokens 2048)

# Seconds of wall time and of processor time that each may take on two idle cores. Both are printed.
TEST_LIMITS := 480 780
E2E_LIMITS := 360 720
# `LATE` in tests/conftest.py has the files that come last, so that a fault shows within a minute.
UNIT_TESTS := tests/tieredkv tests/sizing tests/engine tests/integrations tests/kernels tests/storage tests/operate \
	$(wildcard tests/test_*.py)
NOT_HERE := not gpu and not slow and not stress and not clients
# The tests start hundreds of processes, each of which would compile the package without bytecode.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/pytest -q -rfEs --durations=25 \
	-n 2 --dist worksteal

.PHONY: help setup demo test test-e2e test-full test-clients test-vllm browser lint types checks cpu-tests format \
	reference clean

help:
	@echo "make setup         virtual environment in $(VENV), the package and its development tools"
	@echo "make demo          serve a prompt cold, then from VRAM, host, disk, and disk after a restart"
	@echo "make test          lint, types and the tests of the parts, without a GPU"
	@echo "make test-e2e      the tests of the whole: servers, engines and commands, without a GPU"
	@echo "make test-full     all of these, the slow and stress tests and, with a GPU, the gpu tests"
	@echo "make lint types    ruff; mypy"
	@echo "make test-clients  coding agents, frameworks and clients, from their registries, against a server"
	@echo "make test-vllm     the disk tier behind vLLM's own tiering manager, without a GPU"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) ($(if $(HAS_GPU),with a GPU,without a GPU))"
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(if $(HAS_GPU),true,$(BIN)/python -m pip install --quiet $(CPU_TORCH) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)))
	@$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $@

demo: setup
	@$(BIN)/tieredkv bench ttft --model $(DEMO) --repeats 3 --json

test: setup
	@$(BIN)/python -m tests.timed "make test" $(TEST_LIMITS) -- $(MAKE) --no-print-directory checks

# mypy has one thread, and the tests wait now and then: together they keep two cores busy.
checks: lint
	@$(MAKE) --no-print-directory --jobs 2 types cpu-tests

cpu-tests: setup
	@$(PYTEST) -m "not e2e and $(NOT_HERE)" $(UNIT_TESTS)

test-e2e: setup
	@$(BIN)/python -m tests.timed "make test-e2e" $(E2E_LIMITS) -- \
		$(PYTEST) -m "e2e and $(NOT_HERE)"

test-full: lint types browser
	@$(BIN)/pytest -q -rfEs --durations=25 -m "not gpu and not clients"
	@$(if $(HAS_GPU),$(BIN)/pytest -q -m gpu,echo "not run: the gpu tests, there is no GPU here")

# A Chromium of the system will do. Without one, playwright downloads its own, if it can.
browser: setup
	@$(BIN)/python -m pip install --quiet --group browser || echo "not run: the page in a browser, playwright cannot be installed"
	@$(if $(BROWSER),true,timeout 300 $(BIN)/playwright install --only-shell chromium \
		|| echo "not run: the page in a browser, there is no Chromium here")

# What cannot be installed is named, and its tests are skipped with the reason.
test-clients: setup
	@$(BIN)/python -m tests.e2e.programs.install
	@PYTHONPATH=. TIEREDKV_TEST_PYTHON=$(CURDIR)/$(BIN)/python $(CLIENTS)/older/bin/python -m pytest -q \
		-c /dev/null --rootdir . --noconftest --import-mode=importlib -p no:cacheprovider \
		tests/e2e/test_clients.py
	@$(BIN)/pytest -q -rsx tests/e2e/programs

# vLLM's wheels are large, so that the environments are kept.
test-vllm: setup
	@$(BIN)/python -m tests.integrations.with_vllm

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# What `--help` prints, as a file; a test compares both.
reference: setup
	@$(BIN)/python -P -m tieredkv.cli.reference > docs/cli.md

clean:
	rm -rf $(VENV) $(CLIENTS) $(VLLM) tests/e2e/programs/node_modules tests/e2e/programs/older/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
