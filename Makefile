# Every target sets up what it needs in .venv first; a second call finds it done. PYTHON=... chooses the interpreter.
MAKEFLAGS += --no-print-directory --no-builtin-rules
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo bench test test-systemd lint types layers pytest system gpu-check clean

BIN := .venv/bin
RUN := .venv/.kvd-run
DEV := .venv/.kvd-dev
SETUP_INPUTS := pyproject.toml constraints.txt tools/setup

help:  ## show the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1\t\2/p' Makefile | expand -t 14

demo: $(RUN)  ## processes share a real model's KV cache
	@$(BIN)/kvd demo

bench: $(RUN)  ## the numbers, each beside its limit
	@$(BIN)/kvd bench --quick

test: lint types layers pytest  ## everything that must pass before a change goes in

test-systemd: $(DEV) system  ## the service in a real systemd, in a container (as root; builds its root under .cache)
	@root=$$(tools/systemd-root) && KVD_SYSTEMD_ROOT=$$root $(BIN)/pytest -q tests/system

lint: $(DEV)  ## ruff: rules and formatting
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(DEV)  ## mypy, strict
	@$(BIN)/mypy

layers: $(DEV)  ## import-linter: imports go downwards only
	@$(BIN)/lint-imports --no-cache --no-logo

pytest: $(DEV) system  ## the tests alone
	@$(BIN)/pytest -q

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
