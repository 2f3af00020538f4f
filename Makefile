# Commands for developers and CI; `make help` lists them. Requires only Python 3.11 or newer.

PYTHON ?= python3
VENV := .venv
# Pins of the CUDA libraries that a CUDA build of torch requires; other builds require none of them. For a CUDA release
# other than pip's default: make serve CUDA_PINS=/dev/null
CUDA_PINS := requirements/cuda.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SERVE := $(VENV)/serve.stamp
DEV := $(VENV)/dev.stamp
# A virtual environment holds absolute paths: after a move or a copy it would run the code of its old directory. The
# stamp holds the directory it was made in; an environment from another directory is recreated.
MADE_IN := $(file <$(SERVE))
ifneq ($(MADE_IN),$(CURDIR))
.PHONY: $(SERVE)
endif

PIP_INSTALL = $(VENV)/bin/python -m pip install $$(test -t 1 || echo --quiet) -c $(CUDA_PINS)

.PHONY: help serve test bench embedded lint format setup lock clean
.DEFAULT_GOAL := help

help:
	@echo 'make serve    set up what is missing, then serve (Ctrl-C stops)'
	@echo 'make test     set up what is missing, then run the tests (ARGS="-k name" selects)'
	@echo 'make bench    measure (BENCH=http: the gateway under load; ARGS="--only engine" selects)'
	@echo 'make embedded train the embedded checkpoint (CORPUS=train.txt.xz; ARGS="--tokens 1_000_000" sets its length)'
	@echo 'make lint     ruff, mypy and import-linter, as CI runs them'
	@echo 'make format   apply ruff fixes and formatting'
	@echo 'make setup    set up for serving and developing, run nothing'
	@echo 'make lock     update the pinned versions in requirements/'
	@echo 'make clean    remove the set-up and all caches'
	@echo 'make … PYTHON=/path/to/python3 selects the Python of the set-up'

# `exec`: make forwards signals to its child, which must be Tercet, not a shell.
serve: $(SERVE)
	@exec $(VENV)/bin/tercet serve

# GOMP_SPINCOUNT as in the workers (shared/worker_environment.py), because tests run more processes than cores.
test: $(DEV)
	@GOMP_SPINCOUNT=20000 exec $(VENV)/bin/python -m pytest $(ARGS)

bench: $(DEV)
	@exec $(VENV)/bin/tercet bench $(or $(BENCH),engine) $(ARGS)

# In a directory that `make clean` keeps, because training takes hours. The same command resumes an interrupted run.
embedded: $(SERVE)
	@test -n '$(CORPUS)' || { echo 'CORPUS is not set: make embedded CORPUS=path/to/train.txt.xz' >&2; exit 1; }
	@exec $(VENV)/bin/python -m workers.training.train --corpus '$(CORPUS)' --run .train/embedded $(ARGS)

lint: $(DEV)
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo --no-cache

format: $(DEV)
	@$(VENV)/bin/ruff check --fix
	@$(VENV)/bin/ruff format

setup: $(DEV)

# A stamp is removed first and written last, so an interrupted set-up is never mistaken for a finished one: the next
# starts with a new environment, and pip's cache keeps the downloads.
$(SERVE): requirements/serve.txt requirements/cuda.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'Tercet needs Python 3.11 or newer, which $(PYTHON) is not: install it, or name one with PYTHON=/path/to/python3.' >&2; \
		exit 1; }
	@rm -f $(SERVE) $(DEV)
	@if [ '$(MADE_IN)' != '$(CURDIR)' ]; then \
		echo 'Setting up $(VENV): about a minute, or several where CUDA libraries are downloaded.' && \
		rm -rf $(VENV) && \
		{ $(HAS_VENV) || $(GET_VENV) || { \
			echo 'This Python cannot make virtual environments: run "apt-get install python3-venv" as root, then the same command again.' >&2; \
			exit 1; }; } && \
		$(PYTHON) -m venv $(VENV); \
	fi
	@$(PIP_INSTALL) -r requirements/serve.txt
	@$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --no-index -e .
	@$(VENV)/bin/python -c 'import workers.engine.cpu.kernels'  # compiles them once, for all workers
	@printf '%s\n' '$(CURDIR)' >$(SERVE)

$(DEV): $(SERVE) requirements/dev.txt
	@rm -f $(DEV)
	@$(PIP_INSTALL) -r requirements/serve.txt -r requirements/dev.txt
	@touch $(DEV)

# Debian splits ensurepip, which venv needs, off its python3.
HAS_VENV = $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null
GET_VENV = { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null && $(HAS_VENV); }

# The newest versions that the ranges in pyproject.toml allow, from a temporary environment. The CUDA pins change only
# where torch's build requires CUDA libraries.
lock:
	@rm -rf build/lock && $(PYTHON) -m venv build/lock
	@build/lock/bin/pip install --quiet .
	@$(PINS) >build/lock/all.txt
	@grep -Ev '$(CUDA)' build/lock/all.txt >requirements/serve.txt
	@! grep -E '$(CUDA)' build/lock/all.txt >build/lock/cuda.txt || cp build/lock/cuda.txt requirements/cuda.txt
	@build/lock/bin/pip install --quiet '.[dev]'
	@$(PINS) | grep -vxFf build/lock/all.txt >requirements/dev.txt
	@rm -rf build

PINS = build/lock/bin/pip list --format=freeze --exclude pip --exclude tercet | sed 's/+.*//'
CUDA = ^(cuda|nvidia|triton)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
