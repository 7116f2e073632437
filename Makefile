.PHONY: help setup-demo setup-dev setup-bench kubernetes demo demo-report check unit test pytest test-fast test-all test-long test-engines run-against coverage docs bench bench-real gpu-check screenshots format clean
.DEFAULT_GOAL := help

# Where it is set, as in some containers, each process of the tests compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup-demo:
	@bash scripts/setup.sh demo

setup-dev:
	@bash scripts/setup.sh dev

demo: setup-demo ## train a real model and watch it in a browser: open the link that it prints
	@exec .venv/bin/paceline demo $(ARGS)

demo-report: setup-demo ## the same without a browser: bsp, a switch to chronica, a table
	@exec .venv/bin/paceline demo --report $(ARGS)

check: setup-dev ## lint and types, and the JavaScript modules' unit tests
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo
	.venv/bin/hadolint docker/*.Dockerfile
	.venv/bin/compose-lint docker/compose.yaml >/dev/null
	node_modules/.bin/tsc --project .
	node --test tests/unit/js/*.test.js

unit: setup-dev ## the unit tests alone, with few examples of each property
	.venv/bin/pytest tests/unit --numprocesses 2 --dist worksteal --hypothesis-profile fast $(ARGS)

test-fast: ## lint, types and unit tests side by side: no server, no process, under a minute
	@$(MAKE) --no-print-directory --jobs 2 check unit

# A file's tests stay together, with servers of their own. Four files at once in `make test`, where
# many tests wait for processes and not for the CPU; two in `make test-long`, whose tests compute more.
FILES = --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 8

test: setup-dev ## what must pass at every commit: real Redis protocol, SQLite, Postgres, TorchElastic, Chromium; lint and types
	@$(MAKE) --no-print-directory --jobs 2 check pytest

pytest: setup-dev
	.venv/bin/pytest $(or $(ARGS),--numprocesses 4 $(FILES))

test-all: ## every test there is, before a release: hours
	@$(MAKE) --no-print-directory test ARGS=
	@$(MAKE) --no-print-directory test-long
	@$(MAKE) --no-print-directory test-engines ARGS=

test-long: setup-dev ## the tests that `make test` leaves out (`long`), and 500 examples of each property
	.venv/bin/pytest tests -m long --ignore tests/engines --numprocesses 2 $(FILES)
	.venv/bin/pytest tests/unit --numprocesses 2 --dist worksteal --hypothesis-profile long

test-engines: setup-dev ## runs over several nodes and on real engines, all cases; as root
	@bash scripts/ray.sh
	PACELINE_EXAMPLE_REPORT=$(CURDIR)/.paceline/example.xml \
	.venv/bin/pytest tests/engines -m "long or not long" --numprocesses 2 --dist loadfile --junitxml=.paceline/engines.xml $(ARGS)

run-against: setup-dev ## takes the last `make test-engines` into docs/backends/run-against.md
	.venv/bin/python scripts/run_against.py $(wildcard .paceline/engines.xml .paceline/example.xml)

coverage: setup-dev ## every test, and the line coverage of the three packages
	.venv/bin/coverage erase
	.venv/bin/coverage run -m pytest --numprocesses 4 $(FILES) -W default::coverage.exceptions.CoverageWarning
	.venv/bin/coverage combine --quiet
	.venv/bin/coverage report --skip-covered

kubernetes: ## build Kubernetes 1.20 for the tests on a real one, once: six minutes or more, as root
	@bash scripts/kubernetes.sh

setup-bench:
	@bash scripts/setup.sh bench

bench: setup-bench ## how near each policy and its peers come to the fluid limit (ARGS=--quick)
	.venv/bin/python benchmarks/balance.py $(ARGS)

bench-real: setup-demo ## plain DDP and paceline on real speech, nothing emulated: time per epoch, accuracy
	.venv/bin/python benchmarks/speech.py $(ARGS)

# Needs the library's own dependencies only. It sets nothing up, so it runs on machines without a network.
gpu-check: ## what needs a GPU: times, gradients, synchronisers, copies (ARGS=--quick, PYTHON=python3)
	PYTHONPATH="agent:backend:dashboard$${PYTHONPATH:+:$$PYTHONPATH}" \
	$(or $(PYTHON),$(wildcard .venv/bin/python),python3) benchmarks/gpu_check.py $(ARGS)

docs: setup-dev ## the documentation site, into site/: open site/index.html
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet
	@echo site/index.html

screenshots: setup-dev ## pictures of the dashboard's pages into docs/images: look at them before you commit
	.venv/bin/python scripts/screenshots.py $(ARGS)

format: setup-dev ## format the code
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean: ## remove what the targets above made
	rm -rf site .venv .venv-ray node_modules .paceline .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
