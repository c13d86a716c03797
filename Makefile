# SPDX-License-Identifier: Apache-2.0
# Everything runs from .venv, which `make install` creates. Other targets run `make install` first if .venv is out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := operator,gateway,worker,grpc,tracing,test
STAMP := $(VENV)/.installed
WORKERS ?= auto
GPU_PYTHON ?= $(PYTHON)
SOURCES := worker:operator$${PYTHONPATH:+:$$PYTHONPATH}
COMPILE ?= 1
LOAD_SECONDS ?= 240
SOAK ?=
BENCH ?=
OUT ?=
DRY_RUN ?=
ROUNDS ?= 5

.DEFAULT_GOAL := help
.PHONY: help install demo demo-down test client-tests fuzz test-gpu soak e2e lint bench bench-gpu docs lint-workflows release-dry-run clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## create .venv with everything except the GPU kernels

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Mizzen needs Python 3.11 or later; set PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP) ## start a cluster on this machine, create an InferenceService and chat with it
	$(BIN)/mizzen-local demo

demo-down: ## stop the demo's cluster
	@test ! -x $(BIN)/mizzen-local || $(BIN)/mizzen-local down

lint: $(STAMP) ## run ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: $(STAMP) lint ## run lint, type checks and all tests
	@$(BIN)/mizzen-local assets > /dev/null  # first, because it may have to build them, which takes longer than a test's timeout
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --durations 15

client-tests: $(STAMP) ## run lm-evaluation-harness, litellm and sentence-transformers, in an environment of their own, against `mizzen serve`
	$(PYTHON) -m venv build/client-tools
	build/client-tools/bin/pip install --quiet --disable-pip-version-check --requirement tests/clients/requirements.txt
	build/client-tools/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement tests/clients/requirements-without-dependencies.txt
	$(BIN)/python tests/clients/run_clients.py build/client-tools/bin

fuzz: $(STAMP) ## run the property tests with new random examples, ROUNDS times (default 5)
	for round in $$(seq $(ROUNDS)); do $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m hypothesis --hypothesis-profile fuzz || exit; done

test-gpu: ## run the engine's GPU tests on this machine, with GPU_PYTHON, which must have the packages
	MIZZEN_GPU=required MIZZEN_COMPILE=$(COMPILE) MIZZEN_LOAD_SECONDS=$(LOAD_SECONDS) PYTHONPATH=$(SOURCES) $(GPU_PYTHON) -m pytest tests/gpu tests/engine/test_cuda.py -o addopts="" --import-mode=importlib -q

soak: $(STAMP) ## run rollouts, scaling and faults under load for half an hour or more; shorten with SOAK="--requests 5000 ..."
	$(BIN)/python tests/cluster/soak.py $(SOAK)

e2e: $(STAMP) ## test the whole product on a real cluster: E2E_LOAD=kind, kube or registry (docs/images.md)
	$(BIN)/python tests/e2e/run.py

bench: $(STAMP) ## run the CPU benchmarks on this machine
	$(BIN)/python benchmarks/scheduler_step.py
	$(BIN)/python benchmarks/cpu_vs_transformers.py

bench-gpu: ## run all GPU benchmarks with GPU_PYTHON and print one table; pass options with BENCH="--json"
	PYTHONPATH=$(SOURCES) $(GPU_PYTHON) benchmarks/gpu_all.py $(BENCH)

docs: $(STAMP) ## build the documentation site into site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

lint-workflows: ## check the workflows in .github with actionlint, which must be installed
	actionlint

release-dry-run: $(STAMP) ## make a release in the empty folder OUT, sign it with a new key and verify it (docs/releasing.md)
	@test -n "$(OUT)" || { echo "set OUT to an empty folder" >&2; exit 1; }
	$(PYTHON) -m venv build/release-tools
	build/release-tools/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement scripts/release/requirements.txt
	HELM=$${HELM:-$$($(BIN)/python -c 'from mizzen_local.helm import find_helm; print(find_helm())')} build/release-tools/bin/python scripts/release/dry_run.py $(OUT) $(DRY_RUN)

clean: demo-down ## remove everything that make created
	rm -rf $(VENV) site build
