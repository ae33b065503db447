# Every target sets up what it needs in .venv first; a second call finds it done. PYTHON=... chooses the interpreter.
MAKEFLAGS += --no-print-directory --no-builtin-rules
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo bench test test-cards test-engines test-systemd test-vllm bench-vllm test-llama-cpp-python lint types layers pytest system gpu-check clean

BIN := .venv/bin
RUN := .venv/.kvd-run
DEV := .venv/.kvd-dev
VLLM := .venv-vllm/.kvd-vllm
SETUP_INPUTS := pyproject.toml constraints.txt tools/setup

help:  ## show the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1\t\2/p' Makefile | expand -t 24

demo: $(RUN)  ## processes share a real model's KV cache
	@$(BIN)/kvd demo

bench: $(RUN)  ## the numbers, each beside its limit
	@$(BIN)/kvd bench --quick

test: lint types layers pytest  ## everything but cards, engines and systemd, which have targets of their own

test-cards: $(DEV) system  ## pools on cards, over a fake driver: their own tests, and those of host memory once more
	@$(BIN)/pytest -q -n 2 --dist loadgroup -m card tests

test-engines: $(DEV) system  ## transformers and llama.cpp: real models, real servers
	@$(BIN)/pytest -q -n 2 --dist loadgroup -m "not card" tests/engines
	@$(BIN)/pytest -q tests/soak/test_engines.py

test-systemd: $(DEV) system  ## the service in a real systemd, in a container (as root; builds its root under .cache)
	@root=$$(tools/systemd-root) && KVD_SYSTEMD_ROOT=$$root $(BIN)/pytest -q tests/system

test-vllm: $(VLLM)  ## the vLLM connector in real engines (a vLLM in .venv-vllm, 2.3 GB; about ten minutes)
	@.venv-vllm/bin/pytest -q tests/vllm

bench-vllm: $(VLLM)  ## what storing costs a vLLM engine that finds nothing
	@.venv-vllm/bin/python tools/vllm_overhead.py

test-llama-cpp-python: $(DEV)  ## the cache of llama-cpp-python in the real one (which takes 17 minutes to build)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt 'llama-cpp-python>=0.3.16'
	@KVD_LLAMA_CPP_PYTHON=1 $(BIN)/pytest -q tests/engines/llama_cpp/test_llama_cpp_python.py

lint: $(DEV)  ## ruff: rules and formatting
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(DEV)  ## mypy, strict
	@$(BIN)/mypy

layers: $(DEV)  ## import-linter: imports go downwards only
	@$(BIN)/lint-imports --no-cache --no-logo

pytest: $(DEV) system  ## the tests alone, on two cores
	@$(BIN)/pytest -q -n 2 --dist loadgroup -m "not card" --ignore tests/engines --ignore tests/soak/test_engines.py tests

system:  ## Debian packages that tests use (installed when run as root)
	@tools/system-packages

gpu-check: $(RUN)  ## device pools on this machine's NVIDIA card: a table in under four minutes
	@$(BIN)/python tools/gpu_check.py

clean:  ## remove caches and build outputs; .venv stays
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	@find kvd clients tests -name __pycache__ -type d -exec rm -rf {} +

$(RUN): $(SETUP_INPUTS)
	@tools/setup run

$(DEV): $(SETUP_INPUTS)
	@tools/setup dev

$(VLLM): tools/setup-vllm constraints.txt
	@tools/setup-vllm
