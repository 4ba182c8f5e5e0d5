# Every target works from a bare clone: it makes the environment it needs and says what the machine lacks.

PYTHON ?= python3
VENV ?= .venv
FRAMEWORKS := .venv-frameworks

# A build of another kind (setup.py has the switches) replaces the one in the environment, and is replaced in turn.
KIND := plain$(if $(filter 1,$(FLODL_FAST_DEBUG)),-debug)$(if $(filter 1,$(FLODL_FAST_COVERAGE)),-coverage)$(addprefix -,$(FLODL_FAST_SANITIZE))

BIN := $(VENV)/bin
# Named after PYTHON, so that another one is held against the environment before it is used.
MADE := $(VENV)/.made-$(subst /,-,$(PYTHON))
BUILT := $(VENV)/.built-$(KIND)
SOURCES := setup.py pyproject.toml $(wildcard flodl_fast/*.pyx flodl_fast/*.pxd flodl_fast/_native/*)
DEBUG_PYTHON ?= python3-dbg
ENDS ?=
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?=
FUZZ_FRAMES ?= 200000
TRIALS ?= 300
SOAK_MINUTES ?= 30
ARM_CC := aarch64-linux-gnu-gcc
ARM_RUN := qemu-aarch64

# Where the shell's $(1) fails: root on a system with apt-get gets the Debian packages $(2), others are told of them.
need = $(1) >/dev/null 2>&1 || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(2) >&2; } || \
    { echo 'This needs what Debian and Ubuntu call $(2)' >&2; exit 1; }

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help \
    demo demo-flodl build test test-kernels test-frameworks test-pythons test-arm test-sanitize test-valgrind \
    test-leaks test-faults test-wireshark dissector soak fuzz fuzz-crate coverage bench bench-gate \
    lint docs dist check-dist clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  \1: /p' $(MAKEFILE_LIST)
	@echo 'PYTHON=python3.12 builds with another Python, VENV=dir in another environment than .venv.'

demo: $(VENV)/.with-demo ## train three ranks on real data, three processes over sockets
	$(BIN)/python -m flodl_fast demo

demo-flodl: $(VENV)/.with-demo ## the same three under the published crate's own controller; needs cargo
	$(BIN)/python -m flodl_fast demo --peer

build: $(BUILT) ## compile and install into the environment, editable

test: $(VENV)/.with-test ## the whole suite, then again with the portable kernels
	$(BIN)/python -m pytest
	$(MAKE) --no-print-directory test-kernels

test-kernels: $(VENV)/.with-test ## the suite with the portable kernels
	FLODL_FAST_SHA256=portable FLODL_FAST_FOLD=portable $(BIN)/python -m pytest

test-pythons: $(VENV)/.with-dev ## one wheel for each CPython 3.10 to 3.14 found here, tried with NumPy 1.26 and the newest
	$(BIN)/python scripts/test_pythons.py $(if $(ENDS),--ends)

test-frameworks: export VENV_FLAGS = --system-site-packages
test-frameworks: ## the suites and examples with PyTorch and JAX; PYTHON=/usr/bin/python3 takes the system's PyTorch
	@[ $(PYTHON) != /usr/bin/python3 ] || $(call need,$(PYTHON) -c "import torch",python3-torch)
	$(MAKE) --no-print-directory VENV=$(FRAMEWORKS) $(FRAMEWORKS)/.with-frameworks
	@$(FRAMEWORKS)/bin/python -W error -c 'import torch; torch.ones(1).numpy()' 2>/dev/null || \
	    $(FRAMEWORKS)/bin/python -m pip install --quiet 'flodl_fast[frameworks]' 'numpy<2' # what that PyTorch is built for
	$(FRAMEWORKS)/bin/python -m pytest $(addprefix tests/test_,torch.py jax.py cupy.py model.py examples.py docs.py)

test-arm: ## the checks of the C kernels on an emulated 64-bit Arm
	@$(call need,$(ARM_CC) --version && $(ARM_RUN) --version,gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)
	mkdir -p build
	$(ARM_CC) -O3 -ffp-contract=off -static -Iflodl_fast/_native -o build/check_kernels.arm \
	    tests/native/check_kernels.c $(wildcard flodl_fast/_native/*.c)
	$(ARM_RUN) build/check_kernels.arm armv8 neon

test-sanitize: export FLODL_FAST_SANITIZE = address,undefined
test-sanitize: ## the suite under the address and undefined-behaviour sanitizers
	$(MAKE) $(VENV)/.with-test
	LD_PRELOAD="$(foreach lib,libasan libubsan libstdc++,$$($(CC) -print-file-name=$(lib).so))" \
	    ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc $(BIN)/python -m pytest

test-valgrind: ## the checks of the C kernels that valgrind can run, under its memcheck
	@$(call need,command -v valgrind,valgrind)
	mkdir -p build
	$(CC) -O1 -g -ffp-contract=off -Iflodl_fast/_native -o build/check_kernels.valgrind \
	    tests/native/check_kernels.c $(wildcard flodl_fast/_native/*.c)
	valgrind --quiet --error-exitcode=1 --leak-check=full --show-leak-kinds=all build/check_kernels.valgrind

test-leaks: $(VENV)/.with-test ## failing calls, 200,000 of them, leave nothing; also in a debug build of CPython where one is found
	$(BIN)/python tests/leaks.py
ifneq ($(PYTHON),$(DEBUG_PYTHON))
	@if command -v $(DEBUG_PYTHON) >/dev/null; then \
	    $(MAKE) test-leaks PYTHON=$(DEBUG_PYTHON) VENV=$(VENV)-debug FLODL_FAST_DEBUG=1; \
	else \
	    echo 'References are not counted: no $(DEBUG_PYTHON) here. Debian, Ubuntu: apt-get install python3-dbg'; \
	fi
endif

fuzz: export FLODL_FAST_SANITIZE = address,fuzzer-no-link
fuzz: export CC = clang
fuzz: ## coverage-guided fuzzing of every target, FUZZ_SECONDS each; FUZZ_TARGETS="control mux" picks some
	mkdir -p build
	@$(call need,$(CC) -shared -fsanitize=address -o build/probe.so -x c /dev/null,clang libclang-rt-dev)
	$(MAKE) $(VENV)/.with-fuzz
	LD_PRELOAD="$$($(BIN)/python -c 'import atheris; print(atheris.path())')/asan_with_fuzzer.so" \
	    ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
	    $(BIN)/python tests/fuzz/harness.py $(FUZZ_SECONDS) build/fuzz $(FUZZ_TARGETS)

fuzz-crate: $(VENV)/.with-test ## mutated frames, FUZZ_FRAMES in all, to the published crates and to us: the same outcomes; needs cargo
	FLODL_FAST_MUTATIONS=$(FUZZ_FRAMES) $(BIN)/python -m pytest tests/interop/test_mutations.py

test-faults: $(VENV)/.with-test ## train over networks that fail, TRIALS=300 times; against the crate where cargo is installed
	$(BIN)/python tests/faults.py --trials $(TRIALS)

soak: $(VENV)/.with-test ## train for SOAK_MINUTES=30, kill ranks, watch memory, descriptors and threads
	$(BIN)/python tests/soak.py --minutes $(SOAK_MINUTES)

test-wireshark: $(VENV)/.with-test ## the dissector in tshark; root with apt-get gets tshark installed
	@$(call need,command -v tshark,tshark)
	$(BIN)/python -m pytest tests/test_dissector.py

dissector: $(BUILT) ## write the tables of tools/flodl.lua anew from the messages
	$(BIN)/python scripts/make_dissector.py

coverage: export FLODL_FAST_COVERAGE = 1
coverage: ## line coverage of the Python and Cython sources
	$(MAKE) $(VENV)/.with-dev
	$(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered

bench: $(VENV)/.with-bench ## speeds beside the crate's and other libraries'; writes docs/performance.md (FLODL_BENCH_REVISION=0.8: prints those of 0.8)
	$(BIN)/python -m benchmarks.report

bench-gate: $(VENV)/.with-bench ## compare the working tree's speeds with a revision's: make bench-gate BASE=HEAD~1
	@test -n "$(BASE)" || { echo 'Name the revision to compare with: make bench-gate BASE=HEAD~1' >&2; exit 1; }
	$(BIN)/python -m benchmarks.gate --base $(BASE)

lint: $(VENV)/.with-dev ## ruff; mypy and pyright, also on what the pages show; the stubs against the modules; the workflows
	$(BIN)/ruff check .
	$(BIN)/python tests/test_docs.py build/examples
	$(BIN)/mypy
	$(BIN)/mypy --allow-untyped-defs --allow-untyped-calls build/examples
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/python -m mypy.stubtest flodl_fast._codec flodl_fast._round
	$(BIN)/yamllint --strict .github mkdocs.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github

docs: $(VENV)/.with-docs ## the documentation site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict # with --quiet it would count no warning

dist: $(VENV)/.with-dist ## an sdist, and a wheel built from it, in dist/
	rm -rf dist
	$(BIN)/python -m build

check-dist: dist ## what is in them, the wheel's tags and size, and the wheel at work where there is no compiler
	$(BIN)/python scripts/check_dist.py

clean: ## remove all that the other targets make
	rm -rf build dist *.egg-info $(VENV) $(FRAMEWORKS) .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks .coverage htmlcov
	rm -f flodl_fast/*.so flodl_fast/*.c

$(MADE):
	sh scripts/venv.sh $(PYTHON) $(VENV)
	touch $@

$(BUILT): $(MADE) $(SOURCES)
	rm -f $(VENV)/.built-*
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --config-settings editable_mode=compat --editable .
	touch $@

# The package is installed already, so that pip adds only what the extra of that name asks for.
$(VENV)/.with-%: $(BUILT)
	$(BIN)/python -m pip install --quiet 'flodl_fast[$*]'
	touch $@
