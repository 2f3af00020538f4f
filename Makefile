# Everything a person or CI runs; `make help` lists it. Needs Python 3.11 or newer and nothing else.

PYTHON ?= python3
VENV := .venv
# Where torch's build is for CUDA, its libraries are held to these versions; other builds ask for none
# of them. For another CUDA release than the one plain pip takes: make serve CUDA_PINS=/dev/null
CUDA_PINS := requirements/cuda.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SERVE := $(VENV)/serve.stamp
DEV := $(VENV)/dev.stamp
# A virtual environment holds absolute paths: one that was moved or copied here would run the code of
# the place it came from. The stamp says where it was made; one made elsewhere is made anew.
MADE_IN := $(file <$(SERVE))
ifneq ($(MADE_IN),$(CURDIR))
.PHONY: $(SERVE)
endif

PIP_INSTALL = $(VENV)/bin/python -m pip install $$(test -t 1 || echo --quiet) -c $(CUDA_PINS)

.PHONY: help serve test bench embedded lint format setup lock clean
.DEFAULT_GOAL := help

help:
	@echo 'make serve    set up what is missing, then serve (Ctrl-C stops)'
	@echo 'make test     set up what is missing, then run the tests (ARGS="-k name" chooses)'
	@echo 'make bench    measure (BENCH=http: the gateway under load; ARGS="--only engine" chooses)'
	@echo 'make embedded train the embedded checkpoint (CORPUS=train.txt.xz; ARGS="--tokens 1_000_000" chooses)'
	@echo 'make lint     ruff, mypy and import-linter, as CI runs them'
	@echo 'make format   let ruff rewrite what it can'
	@echo 'make setup    only set up, for serving and developing'
	@echo 'make lock     renew the pinned versions in requirements/'
	@echo 'make clean    remove the set-up and every cache'
	@echo 'make … PYTHON=/path/to/python3 chooses the Python of the set-up'

# `exec`: make hands signals to the process it started, and that must be Tercet itself, not a shell.
serve: $(SERVE)
	@exec $(VENV)/bin/tercet serve

# Compute threads of the tests sleep soon, as the workers' do (shared/worker_environment.py): tests share their cores.
test: $(DEV)
	@GOMP_SPINCOUNT=20000 exec $(VENV)/bin/python -m pytest $(ARGS)

bench: $(DEV)
	@exec $(VENV)/bin/tercet bench $(or $(BENCH),engine) $(ARGS)

# In a place that `make clean` leaves alone: it is hours of work. The same command goes on with a run that was stopped.
embedded: $(SERVE)
	@test -n '$(CORPUS)' || { echo 'Say which text: make embedded CORPUS=path/to/train.txt.xz' >&2; exit 1; }
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

# A stamp is removed first and written last, so a set-up that was interrupted is never taken for a
# finished one: it starts over with a new environment, and pip's cache keeps what was downloaded.
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

# The newest versions that the ranges in pyproject.toml allow, from a throw-away environment. CUDA's are
# renewed only where torch's build brings them.
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
