# make demo   first command: install, serve a small hybrid model, ask it, measure it
# make test   second command: every test that needs no GPU
# make serve MODEL=folder-or-name [ARGS="--max-model-len 4096"]
# make gate   the fork against itself, each feature on and off: answers and speed
# make lint, make format, make tree, make install, make clean
#
# Everything is made below build/ and .venv/. DEVICE=cuda builds for the GPU from
# source: README.md says what that needs.

PYTHON ?= python3
VENV ?= .venv
DEVICE ?= cpu
ARGS ?=
MODEL ?=
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PY := $(VENV)/bin/python
# cmake and ninja come from the environment.
export PATH := $(abspath $(VENV))/bin:$(PATH)
export VLLM_TARGET_DEVICE := $(DEVICE)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export VLLM_NO_USAGE_STATS := 1
export HF_HUB_OFFLINE ?= 1
say = @printf '\n== %s\n' $(1)

.PHONY: help demo serve gate test test-own test-slow test-upstream lint format tree install clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

$(VENV)/.tools: requirements/fork.txt
	$(call say,'environment in $(VENV)')
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 15) else f"Python 3.11 to 3.14 is needed, $(PYTHON) is {v.major}.{v.minor}")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --upgrade 'pip>=24.2' -r requirements/fork.txt
	@touch $@

# === instead of ==: a build with a local version (+cpu) has no matching torchvision.
$(VENV)/.deps: $(VENV)/.tools requirements/sm70-$(DEVICE).txt requirements/sm70-build.txt
	$(call say,'torch and the packages that vLLM needs: 5 GB and about two minutes')
	$(PY) -m tools.fork tree
	@# A build for CUDA keeps the torch that is there: see README.md.
	test $(DEVICE) = cuda || $(PY) -m pip install 'torch===2.13.0' 'torchvision===0.28.0'
	$(PY) -m pip install -r build/tree/requirements/sm70-$(DEVICE).txt -r requirements/sm70-build.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.deps pyproject.toml $(wildcard patches/* csrc/sm70/* cmake/* requirements/sm70-*.txt tools/fork/*.py)
	$(call say,'the fork and its extension compiled here')
	$(PY) -m pip install --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.test-deps: $(VENV)/.deps requirements/fork-test.txt
	$(PY) -m pip install -r requirements/fork-test.txt
	@touch $@

tree: $(VENV)/.tools
	$(PY) -m tools.fork tree

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(call say,'demo')
	$(PY) -m tools.demo $(ARGS)

serve: $(VENV)/.installed
	@HF_HUB_OFFLINE=$(if $(wildcard $(MODEL)),1,0) exec $(PY) -m tools.demo.serve '$(MODEL)' $(ARGS)

gate: $(VENV)/.installed
	$(call say,'gate: each feature on and off')
	$(PY) -m tools.gate $(ARGS)

test: test-own test-upstream

test-own: $(VENV)/.installed $(VENV)/.test-deps
	$(call say,'the tests of this repository')
	$(PY) -m pytest $(ARGS)

# Not in CI: engines end to end, minutes each.
test-slow: $(VENV)/.installed $(VENV)/.test-deps
	$(PY) -m pytest -m 'slow and not cuda' $(ARGS)

test-upstream: $(VENV)/.installed $(VENV)/.test-deps
	$(call say,'the tests of upstream for what the series touches')
	$(PY) -m tools.upstream_tests

SOURCES := tools tests vllm benchmarks setup.py
CPP := $(wildcard csrc/sm70/*.h csrc/sm70/*.cpp csrc/sm70/*.cu csrc/sm70/*.cuh)
# mypy reads vLLM's own modules through the installation.
lint: $(VENV)/.installed $(VENV)/.test-deps
	$(call say,'lint')
	$(VENV)/bin/ruff check $(wildcard $(SOURCES))
	$(VENV)/bin/ruff format --check $(wildcard $(SOURCES))
	$(VENV)/bin/mypy tools
	$(VENV)/bin/mypy $(shell find vllm benchmarks -name '*.py' 2>/dev/null)
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP)
	$(PY) -m tools.lint
	$(PY) -m tools.fork verify

format: $(VENV)/.test-deps
	$(VENV)/bin/ruff check --fix-only $(wildcard $(SOURCES))
	$(VENV)/bin/ruff format $(wildcard $(SOURCES))
	$(VENV)/bin/clang-format -i $(CPP)

clean:
	rm -rf build $(VENV)
