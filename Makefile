# Commands for developers and CI; `make help` lists them. Requires only Python 3.11 or newer.

PYTHON ?= python3
VENV := .venv
# Pins of the CUDA libraries that a CUDA build of torch requires; other builds require none of them. For a CUDA release
# other than pip's default: make serve CUDA_PINS=/dev/null
CUDA_PINS := requirements/cuda.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Container images often set it. Without bytecode, each start compiles torch's sources again, which takes 2 s.
unexport PYTHONDONTWRITEBYTECODE

SERVE := $(VENV)/serve.stamp
KERNEL_SOURCES := $(wildcard workers/engine/cpu/kernel_source/*.* workers/engine/cpu/kernel_source/sets/*) \
	workers/engine/cpu/layouts.py shared/cpu_features.py
DEV := $(VENV)/dev.stamp
# cpu, cuda or default selects the build of torch; empty: the machine does (requirements/torch_build.py). The stamp holds
# the selection, which stays until another is given: that replaces torch.
TORCH_STAMP := $(VENV)/torch.stamp
TORCH ?= $(file <$(TORCH_STAMP))
TORCH := $(TORCH)
export TORCH
# pip-audit, cyclonedx-py, check-jsonschema and uv, apart from what Tercet imports.
TOOLS := build/tools/tools.stamp
# Completions clients, apart as well: together they require other versions of Tercet's own dependencies.
CLIENTS := build/clients/clients.stamp
# A virtual environment holds absolute paths: after a move or a copy it would run the code of its old directory. The
# stamp holds the directory it was made in; an environment from another directory is recreated.
ifneq ($(file <$(SERVE)) $(file <$(TORCH_STAMP)),$(CURDIR) $(TORCH))
.PHONY: $(SERVE)
endif

PIP = $(VENV)/bin/python -m pip
# No source archives: building one would install and run build tools that are not pinned. Python compiles what it imports
# when it first does so: compiling every module of torch and transformers took a third of the set-up.
INSTALL = install $$(test -t 1 || echo --quiet) --no-compile --only-binary :all:

.PHONY: help help-all serve test test-integration test-full test-all test-clients test-deploy chaos soak bench docs gpu gpu-wheels npm site vendor release embedded lint format setup setup-serve lock audit sbom clean
.DEFAULT_GOAL := help

help:
	@echo 'make serve             set up what is missing, then serve (Ctrl-C stops)'
	@echo 'make test              set up what is missing, then run the tests (ARGS="-k name" selects); minutes'
	@echo 'make test-integration  the tests with servers of their own, Chromium, nginx, redis and moto; 20 minutes'
	@echo 'make -k test-all       every suite, one after the other; two hours (-k goes on after one that fails)'
	@echo 'make lint              ruff, mypy, import-linter, oxlint and the limits of size, as CI runs them'
	@echo 'make format            apply the fixes of ruff and oxlint, and formatting'
	@echo 'make bench             measure (BENCH=http: the gateway under load; ARGS="--only engine" selects)'
	@echo 'make help-all          the other targets, and options'

help-all: help
	@echo 'make test-clients      the tests of the completions clients that need an environment of their own; minutes'
	@echo 'make test-deploy       the tests of systemd units, container image and others, with Debian packages, as root; minutes'
	@echo 'make chaos             measure the promises of docs/RELIABILITY.md under faults; minutes (ARGS="--help" lists options)'
	@echo 'make soak              the same, ten times as long'
	@echo 'make gpu               measure a machine with a GPU, in ten minutes; again continues it (ARGS="--rehearse": without one)'
	@echo 'make gpu-wheels        gather what a bare machine lacks for tests/bench/gpu/run.sh (Python 3.12, x86_64)'
	@echo 'make docs              write the pages and tables of docs/ that commands write, from docs/results and the code'
	@echo 'make npm               pack the JavaScript client as an npm package'
	@echo 'make site              build the documentation as a site with a search, into build/site'
	@echo 'make vendor            bundle CodeMirror and copy Swagger UI for the pages, from deploy/packaging/vendor'
	@echo 'make release           check that the version is the same everywhere, and build what is published, into dist/'
	@echo 'make embedded          train the embedded checkpoint (CORPUS=train.txt.xz; ARGS="--tokens 1_000_000" sets its length)'
	@echo 'make setup             set up for serving and developing, run nothing'
	@echo 'make setup-serve       set up for serving, run nothing'
	@echo 'make lock              write requirements/ anew, with the versions they pin (ARGS=--upgrade: the newest allowed)'
	@echo 'make audit             look up known vulnerabilities of every pinned version'
	@echo 'make sbom              write build/sbom.json (CycloneDX) and compare it with requirements/'
	@echo 'make clean             remove the set-up and all caches'
	@echo 'make … PYTHON=/path/to/python3 selects the Python of the set-up'
	@echo 'make … TORCH=cpu (or cuda, or default: as pip is configured) selects the build of torch, else the machine does'

# `exec`: make forwards signals to its child, which must be Tercet, not a shell.
serve: $(SERVE)
	@exec $(VENV)/bin/tercet serve --fetch

# One thread each, because there is a process of tests per core, and their models are tiny: threads would wait for each
# other, spinning. The plan of a server that a test starts says how many its workers have.
PYTEST = OMP_NUM_THREADS=1 GOMP_SPINCOUNT=20000 exec $(VENV)/bin/python -m pytest

# One process of tests per core, which runs whole modules: a module's tests share fixtures. tests/conftest.py has the order.
# Integration tests wait for servers, each of which uses the cores too.
PARALLEL = --dist loadfile --no-loadscope-reorder

test: $(DEV)
	@$(PYTEST) $(PARALLEL) --numprocesses logical --maxprocesses 4 $(ARGS)

test-integration: $(DEV)
	@$(PYTEST) -m 'integration and not full and not clients and not deploy' $(PARALLEL) --numprocesses 2 $(ARGS)

# Firefox, Obsidian, VS Code, the Triton interpreter, the benchmarks' commands.
test-full: $(DEV)
	@$(PYTEST) -m '(full or bench) and not clients and not deploy' --ignore=tests/clients -rs $(ARGS)

test-all: PYTEST += --hypothesis-profile=full
test-all: lint test test-integration test-full test-clients test-deploy chaos

# The tests run in Tercet's environment, the clients in theirs.
test-clients: $(DEV) $(CLIENTS)
	@$(PYTEST) tests/clients -m 'clients or full' $(ARGS)

# A test that lacks its Debian package fails and names it (tests/deploy/needs.py). As root, because they build an image and mount file systems.
test-deploy: $(DEV) $(TOOLS)
	@$(PIP) $(INSTALL) --require-hashes -r requirements/ray.txt
	@$(PYTEST) -m deploy -rs $(ARGS)

chaos: $(DEV)
	@exec $(VENV)/bin/python -m tests.chaos $(ARGS)

soak: $(DEV)
	@exec $(VENV)/bin/python -m tests.chaos --soak $(ARGS)

bench: $(DEV)
	@exec $(VENV)/bin/python -m tests.bench $(or $(BENCH),engine) $(ARGS)

gpu: $(DEV)
	@exec $(VENV)/bin/python -m tests.bench gpu --out build/gpu $(ARGS) >/dev/null

docs: $(DEV)
	@$(VENV)/bin/tercet settings --markdown >docs/SETTINGS.md
	@$(VENV)/bin/python -m tests.compatibility >docs/COMPATIBILITY.md
	@$(VENV)/bin/python -m tests.documentation.written

npm: $(DEV)
	@$(VENV)/bin/python -m deploy.clients.npm.client_package build/npm

vendor: $(DEV)
	@$(VENV)/bin/python -m deploy.packaging.vendor.bundles build/vendor

site: $(DEV)
	@$(VENV)/bin/python -m deploy.packaging.site.documentation build/site

release: $(DEV) $(TOOLS)
	@$(VENV)/bin/python -m deploy.packaging.release

gpu-wheels:
	@$(PYTHON) -m tests.bench.gpu.wheels build/gpu-wheels

C_SOURCES = $(wildcard workers/engine/cpu/kernel_source/*.[ch] workers/engine/cpu/kernel_source/sets/*.h)

# In a directory that `make clean` keeps, because training takes hours. The same command resumes an interrupted run.
embedded: $(DEV)
	@test -n '$(CORPUS)' || { echo 'CORPUS is not set: make embedded CORPUS=path/to/train.txt.xz' >&2; exit 1; }
	@exec $(VENV)/bin/python -m workers.training.train --corpus '$(CORPUS)' --run .train/embedded $(ARGS)

lint: $(DEV)
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo --no-cache
	@$(VENV)/bin/oxlint
	@$(VENV)/bin/clang-format --dry-run -Werror $(C_SOURCES)
	@$(VENV)/bin/python -m tests.sizes

format: $(DEV)
	@$(VENV)/bin/ruff check --fix
	@$(VENV)/bin/ruff format
	@$(VENV)/bin/oxlint --fix
	@$(VENV)/bin/clang-format -i $(C_SOURCES)

setup: $(DEV)

setup-serve: $(SERVE)

# A stamp is removed first and written last, so an interrupted set-up is never mistaken for a finished one. The next
# resumes it, unless the environment was made in another directory or with another Python. pip writes a package's RECORD
# last: a package without one was interrupted, and pip must not mistake it for an installed one.
$(SERVE): requirements/pip.txt requirements/serve.txt requirements/torch.txt requirements/torch_build.py \
		requirements/cuda.txt requirements/compiler.txt pyproject.toml $(KERNEL_SOURCES)
	$(if $(findstring |$(TORCH)|,|cpu|cuda|default||),,$(error TORCH=$(TORCH) names no build of torch: set it to cpu, cuda or default, or leave it out))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'Tercet needs Python 3.11 or newer; $(PYTHON) is missing or older. Install it, or name one with PYTHON=/path/to/python3.' >&2; \
		exit 1; }
	@rm -f $(SERVE) $(DEV)
	@if [ "$$($(ORIGIN))" != "$$(cat $(VENV)/made.stamp 2>/dev/null)" ]; then \
		echo 'Setting up $(VENV): about a minute, or several where CUDA libraries are downloaded.' && \
		rm -rf $(VENV) && \
		{ $(HAS_VENV) || { \
			echo 'This Python cannot make virtual environments: run "apt-get install python3-venv" as root, then the same command again.' >&2; \
			exit 1; }; } && \
		$(PYTHON) -m venv $(VENV) && \
		$(ORIGIN) >$(VENV)/made.stamp; \
	fi
	@for info in $(VENV)/lib/python*/site-packages/*.dist-info; do [ -e "$$info/RECORD" ] || rm -rf "$$info"; done
	@$(PIP) $(INSTALL) --require-hashes -r requirements/pip.txt
	@[ '$(TORCH)' = "$$(cat $(TORCH_STAMP) 2>/dev/null)" ] || { \
		$(PIP) uninstall -qq --yes torch && printf '%s\n' '$(TORCH)' >$(TORCH_STAMP); }
	@$(VENV)/bin/python requirements/torch_build.py >$(VENV)/torch.txt
	@$(PIP) $(INSTALL) --require-hashes -c requirements/serve.txt numpy
	@$(COMPILE_KERNELS) & compiler=$$!; \
		$(PIP) $(INSTALL) --require-hashes -c requirements/serve.txt $(TORCH_REQUIRES) && \
		$(PIP) $(INSTALL) -r $(VENV)/torch.txt -c $(CUDA_PINS) && \
		$(PIP) $(INSTALL) --require-hashes -r requirements/serve.txt && \
		$(PIP) $(INSTALL) --require-hashes --target build/backend -r requirements/backend.txt && \
		PYTHONPATH=build/backend $(PIP) install -qq --no-deps --no-build-isolation --no-index -e . && \
		rm -rf build/backend && \
		wait $$compiler
	@printf '%s\n' '$(CURDIR)' >$(SERVE)

# The CPU kernels are compiled while pip installs the rest, which is why numpy comes first. The compiler is not kept, but
# in an environment for developing, whose tests compile for other machines. torch's own requirements come before torch,
# so that their hashes are checked.
BUILD_KERNELS = $(VENV)/bin/python -m workers.engine.cpu.kernel_source.build
COMPILE_KERNELS = { if $(VENV)/bin/python -c 'import ziglang' 2>/dev/null; then $(BUILD_KERNELS); else \
		$(PIP) $(INSTALL) --require-hashes --target build/compiler -r requirements/compiler.txt && \
		PYTHONPATH=build/compiler $(BUILD_KERNELS) && rm -rf build/compiler; fi; }
TORCH_REQUIRES = filelock fsspec jinja2 networkx setuptools sympy typing-extensions

$(DEV): $(SERVE) requirements/dev.txt
	@rm -f $(DEV)
	@$(PIP) $(INSTALL) --require-hashes -r requirements/serve.txt -r requirements/dev.txt -r requirements/compiler.txt
	@$(VENV)/bin/python -c 'import triton, cuda.bindings' 2>/dev/null || \
		$(PIP) $(INSTALL) -c requirements/cuda.txt $(GPU_COMPILER)
	@touch $(DEV)

# What a CUDA build of torch brings along. Without a GPU, the tests compile and interpret the kernels with them.
GPU_COMPILER = triton cuda-bindings

# Where and with which Python a virtual environment is made.
ORIGIN = $(PYTHON) -c 'import sys; print("$(CURDIR)", sys.base_prefix, *sys.version_info[:2])'

# Debian splits ensurepip, which venv needs, off its python3.
HAS_VENV = $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null

$(TOOLS): requirements/pip.txt requirements/tools.txt
	@rm -rf build/tools && $(PYTHON) -m venv build/tools
	@build/tools/bin/python -m pip $(INSTALL) --require-hashes -r requirements/pip.txt
	@build/tools/bin/python -m pip $(INSTALL) --require-hashes -r requirements/tools.txt
	@touch $(TOOLS)

# These packages of lm-eval have no wheels. Theirs are the only source archives, built with the pinned setuptools.
CLIENT_SOURCES = rouge-score sqlitedict word2number

$(CLIENTS): requirements/pip.txt requirements/clients.txt
	@rm -rf build/clients && $(PYTHON) -m venv build/clients
	@build/clients/bin/python -m pip $(INSTALL) --require-hashes -r requirements/pip.txt
	@build/clients/bin/python -m pip $(INSTALL) --require-hashes -c requirements/clients.txt setuptools
	@build/clients/bin/python -m pip $(INSTALL) $(CLIENT_SOURCES:%=--no-binary %) --no-build-isolation --require-hashes \
		-r requirements/clients.txt
	@touch $(CLIENTS)

# The same pins serve every supported platform: resolved for the oldest and the newest Python that torch has wheels for,
# on both architectures, they must be equal. `--no-emit-package` splits them into files, each listed with its purpose.
lock: $(TOOLS)
	@rm -rf build/lock && mkdir -p build/lock
	@cat requirements/serve.txt requirements/torch.txt requirements/cuda.txt requirements/dev.txt >build/lock/all.txt
	@$(COMPILE) $(OLDEST) pyproject.toml --extra dev $(ARGS) --no-annotate --no-header -o build/lock/all.txt
	@cp build/lock/all.txt build/lock/newest.txt
	@$(COMPILE) $(NEWEST) pyproject.toml --extra dev --no-annotate --no-header -o build/lock/newest.txt
	@diff build/lock/all.txt build/lock/newest.txt
	@{ sed -n '/^#/p' requirements/torch.txt; grep -E '^torch==' build/lock/all.txt; } >build/lock/torch.txt
	@{ sed -n '/^#/p' requirements/cuda.txt; grep -E '$(CUDA)' build/lock/all.txt; } >build/lock/cuda.txt
	@cp build/lock/all.txt build/lock/serve.txt
	@$(COMPILE) $(OLDEST) pyproject.toml --generate-hashes $(call NOT,torch cuda) -o build/lock/serve.txt
	@cp build/lock/all.txt build/lock/dev.txt
	@$(COMPILE) $(OLDEST) pyproject.toml --extra dev --generate-hashes $(call NOT,torch cuda serve) -o build/lock/dev.txt
	@cp build/lock/all.txt build/lock/ray.txt
	@$(COMPILE) $(OLDEST) pyproject.toml --extra ray --generate-hashes $(call NOT,torch cuda serve) -o build/lock/ray.txt
	@cp requirements/backend.txt requirements/compiler.txt requirements/pip.txt requirements/tools.txt requirements/clients.txt build/lock
	@$(COMPILE) $(OLDEST) --group compiler --generate-hashes $(ARGS) -o build/lock/compiler.txt
	@$(COMPILE) $(OLDEST) --group backend --generate-hashes $(ARGS) -o build/lock/backend.txt
	@$(COMPILE) $(OLDEST) --group pip --generate-hashes $(ARGS) -o build/lock/pip.txt
	@$(COMPILE) $(OLDEST) --group tools --generate-hashes $(ARGS) -o build/lock/tools.txt
	@$(COMPILE) $(OLDEST) --group clients $(CLIENT_SOURCES:%=--no-binary %) --generate-hashes $(ARGS) -o build/lock/clients.txt
	@for name in backend compiler pip serve torch cuda dev ray tools clients; do cp build/lock/$$name.txt requirements; done

COMPILE = build/tools/bin/uv pip compile --quiet --python build/tools/bin/python --only-binary :all: --custom-compile-command 'make lock'
OLDEST = --python-version 3.11 --python-platform x86_64-manylinux_2_28
NEWEST = --python-version 3.14 --python-platform aarch64-manylinux_2_28
CUDA = ^(cuda|nvidia|triton)
# Options that keep the packages of these files out of the output.
NOT = $$(sed -nE 's/^([a-z0-9.-]+)==.*/--no-emit-package \1/p' $(1:%=build/lock/%.txt))

audit: $(TOOLS)
	@build/tools/bin/python requirements/audit.py requirements/*.txt

# What `make serve` installs, CUDA libraries included.
sbom: $(TOOLS) $(DEV)
	@cat requirements/pip.txt requirements/serve.txt requirements/torch.txt requirements/cuda.txt | \
		build/tools/bin/python -W ignore -m cyclonedx_py requirements --pyproject pyproject.toml --output-reproducible \
		-o build/sbom.json -
	@SBOM=build/sbom.json $(VENV)/bin/python -m pytest -q tests/deploy/packaging/test_requirements.py -k sbom

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
