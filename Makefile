# Everything runs from .venv, which `make install` fills; the other targets call it when something is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := operator,gateway,worker,tracing,test
STAMP := $(VENV)/.installed
WORKERS ?= auto
GPU_PYTHON ?= $(PYTHON)
SOURCES := worker:operator$${PYTHONPATH:+:$$PYTHONPATH}
COMPILE ?= 1
LOAD_SECONDS ?= 240
SOAK ?=
BENCH ?=
ROUNDS ?= 5

.DEFAULT_GOAL := help
.PHONY: help install demo demo-down test fuzz test-gpu soak e2e lint bench bench-gpu docs clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## make .venv with everything but the GPU kernels

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Mizzen needs Python 3.11 or later; set PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP) ## a cluster on this machine, an InferenceService, a chat answer
	$(BIN)/mizzen-local demo

demo-down: ## stop the demo's cluster
	@test ! -x $(BIN)/mizzen-local || $(BIN)/mizzen-local down

lint: $(STAMP) ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: $(STAMP) lint ## lint, types and all tests
	@$(BIN)/mizzen-local assets > /dev/null  # before any test's time limit runs: without downloads this builds them
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --durations 15

fuzz: $(STAMP) ## the property tests with examples of their own at every run; ROUNDS=50 for more
	for round in $$(seq $(ROUNDS)); do $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m hypothesis --hypothesis-profile fuzz || exit; done

test-gpu: ## the engine's tests on this machine's GPU, by a GPU_PYTHON that has its packages
	MIZZEN_GPU=required MIZZEN_COMPILE=$(COMPILE) MIZZEN_LOAD_SECONDS=$(LOAD_SECONDS) PYTHONPATH=$(SOURCES) $(GPU_PYTHON) -m pytest tests/gpu tests/engine/test_cuda.py -o addopts="" --import-mode=importlib -q

soak: $(STAMP) ## hours of rollouts, scaling and faults under load; SOAK="--requests 5000 ..." for less
	$(BIN)/python tests/cluster/soak.py $(SOAK)

e2e: $(STAMP) ## the whole product on a real cluster: E2E_LOAD=kind, kube or registry (docs/images.md)
	$(BIN)/python tests/e2e/run.py

bench: $(STAMP) ## the benchmarks that run on this machine's CPU
	$(BIN)/python benchmarks/scheduler_step.py
	$(BIN)/python benchmarks/cpu_vs_transformers.py

bench-gpu: ## the benchmarks of this machine's GPU and one table of them, by GPU_PYTHON; BENCH="--json" and the like
	PYTHONPATH=$(SOURCES) $(GPU_PYTHON) benchmarks/gpu_all.py $(BENCH)

docs: $(STAMP) ## build the documentation site into site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

clean: demo-down ## remove what make made
	rm -rf $(VENV) site build
