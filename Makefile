# Two commands are the whole set-up: `make demo` and `make test`. Everything they need is installed or built on the way,
# and slow builds are kept outside the checkout (see docs/datacenters.md). Python wheels and Go modules are pinned by
# hash (locks/, go.sum); Debian packages are what the machine's apt has of the suite. `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest
TRACE ?=
REQUESTS ?= 120
UPGRADE ?=

export PYTHONUNBUFFERED := 1

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

# What the datacenters need of Debian is unpacked into the cache, not installed (docs/datacenters.md). Only Python's own
# venv module is a package that a fresh machine may lack.
.PHONY: system
system:
	@command -v go >/dev/null || { echo "go is not on PATH: the datacenters are built from Go modules; install Go 1.26 or later (https://go.dev/dl)" >&2; exit 1; }
	@found="$$(cd e2e/datacenters/toolchain && go env GOVERSION 2>/dev/null || go version | cut -d' ' -f3)"; \
	  printf '%s\n' go1.26 "$$found" | sort -VC || { echo "Go 1.26 or later is needed; go on PATH is $$found: install a newer one (https://go.dev/dl)" >&2; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on PATH: install Python 3.11 or later, or name it: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1): name another: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { command -v apt-get >/dev/null && echo "installing python3-venv" && \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null; } || \
	  { echo "Python's venv module is missing: install python3-venv" >&2; exit 1; }

# The virtual environment is made again only when the lock changes.
VENV_STAMP := $(VENV)/.made-from-$(shell sha256sum locks/dev.txt pyproject.toml | sha256sum | cut -c1-16)
$(VENV_STAMP): locks/dev.txt pyproject.toml
	@echo "making the virtual environment from locks/dev.txt"
	@rm -f $(VENV)/.made-from-*
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r locks/dev.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

.PHONY: venv
venv: system
	@$(MAKE) --no-print-directory $(VENV_STAMP)

.PHONY: toolchain
toolchain: venv
	@$(BIN)/python -m e2e.datacenters build

# Public clients and routers that the tests run, each in an environment of its own in the cache (e2e/environments.py),
# and vLLM's source, whose parser reads what we render (e2e/vllm_source.py).
.PHONY: clients
clients: venv
	@$(BIN)/python -m e2e.environments
	@$(BIN)/python -m e2e.vllm_source >/dev/null

.PHONY: demo
demo: toolchain ## two datacenters, the operator in both, real requests (TRACE=file replays a Mooncake-format trace)
	@$(BIN)/python -m e2e.demo --requests $(REQUESTS) $(if $(TRACE),--trace "$(TRACE)")

.PHONY: down
down: venv ## take the datacenters down and leave the machine as before
	@$(BIN)/python -m e2e.datacenters down

.PHONY: images
images: toolchain ## build the operator's image (and keep it for the datacenters)
	@$(BIN)/python -m e2e.images

.PHONY: wheels
wheels: venv ## what Containerfile needs in dist/wheels: the image's wheels, by hash, and ours
	@$(BIN)/python -m e2e.images --wheels dist/wheels

.PHONY: lint
lint: venv ## ruff, mypy --strict, the import contract, CRD drift
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@PYTHONPATH=operator $(BIN)/lint-imports
	@$(BIN)/prfaas crds --check

.PHONY: test
test: toolchain clients lint ## everything that must pass: lint, types, contracts, unit, API server, Envoy, end to end
	@$(PYTEST) tests e2e/scenarios -m "not long" --durations=30

.PHONY: test-unit
test-unit: venv ## what is quick: no cluster, no API server, no third-party client, no process of ours; under a minute
	@$(PYTEST) tests -m "not apiserver and not envoy and not datacenters and not clients and not slow and not long"

.PHONY: test-long
test-long: toolchain clients lint ## chaos, soaks and benches besides; results go to docs/results/
	@$(BIN)/python -m e2e.bench --results docs/results
	@$(PYTEST) tests e2e/scenarios --durations=30

.PHONY: crds
crds: venv ## write crds/ and the CRD chart from the models
	@$(BIN)/prfaas crds

.PHONY: lock
lock: venv ## resolve the dependencies again (UPGRADE=--upgrade takes newer versions)
	@for kind in "runtime --extra envoy" "dev --extra envoy --extra plot --extra dev"; do set -- $$kind; name=$$1; shift; \
	  $(BIN)/uv pip compile pyproject.toml "$$@" --generate-hashes --no-emit-index-url --no-header --python-version 3.11 --quiet $(UPGRADE) -o locks/$$name.txt; done
	@for file in locks/*.in locks/clients/*.in; do \
	  $(BIN)/uv pip compile $$file --generate-hashes --no-emit-index-url --no-header --python-version 3.11 --quiet $(UPGRADE) -o $${file%.in}.txt; done

.PHONY: clean-cache
clean-cache: venv ## forget every cached build (the next one takes about as long as the first)
	@$(BIN)/python -m e2e.datacenters clean-cache
