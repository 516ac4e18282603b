# make bench   set up .venv, build, run the microbenchmark of every op  (BENCH_ARGS="--ranks 4")
# make bench-peers   install what `coconet-bench --vs all` compares with, beyond torch's own
# make test    set up .venv, build, run every test                      (TEST_ARGS="-k adam")
# make native  build and run the native tests of csrc/cpu, csrc/emulator and csrc/cuda: no Python or torch
# make sanitize  the same plain, under ThreadSanitizer, and under AddressSanitizer with UBSan
# make mutants   remove each synchronization once; a test must notice   (MUTANTS_ARGS="--only heap")
# make cuda-gate  compile every CUDA kernel for every architecture and check the code: no GPU needed
# make lint | format | setup | clean
#
# The stamps in .venv remember what is done, so a second run starts at once.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := setup

VENV := .venv
BIN := $(VENV)/bin
CPP := $(shell find csrc python -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \
    2>/dev/null)
# Folders too: their time changes when a file is added or deleted.
CPP_DIRS := $(shell find csrc python -type d -not -name __pycache__ 2>/dev/null)
BENCH_ARGS ?=
TEST_ARGS ?=
MUTANTS_ARGS ?=
NATIVE_TESTS := tests/native tests/emulator tests/cuda
# Headers and sources outside the extension.
CPP_TESTS := $(wildcard $(foreach folder,$(NATIVE_TESTS),$(addprefix $(folder)/*.,h cpp cu)))

.PHONY: bench bench-peers test native sanitize mutants cuda-gate lint format setup clean

bench: setup
	$(BIN)/coconet-bench all $(BENCH_ARGS)

bench-peers: setup
	@scripts/setup_peers.sh

test: setup
	$(BIN)/pytest $(TEST_ARGS)

native:
	@for folder in $(NATIVE_TESTS); do $(MAKE) --no-print-directory -C $$folder run; done

sanitize:
	@for folder in $(NATIVE_TESTS); do \
	    for mode in plain thread address; do \
	        $(MAKE) --no-print-directory -C $$folder run MODE=$$mode; \
	    done; \
	done

mutants:
	@python3 scripts/mutation_check.py $(MUTANTS_ARGS)

cuda-gate: $(VENV)/.tools
	@$(BIN)/python scripts/cuda_gate.py

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "clang-format --dry-run -Werror: $(words $(CPP) $(CPP_TESTS)) files"
	@printf '%s\n' $(CPP) $(CPP_TESTS) | xargs -r $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@echo "clang-format -i: $(words $(CPP) $(CPP_TESTS)) files"
	@printf '%s\n' $(CPP) $(CPP_TESTS) | xargs -r $(BIN)/clang-format -i

setup: $(VENV)/.installed $(VENV)/.built

$(VENV)/.tools: requirements-dev.txt requirements-cuda.txt scripts/setup_venv.sh
	@scripts/setup_venv.sh
	@touch $@

# ninja recompiles what changed; sed shortens its command lines to "[1/5] csrc/cpu/heap.cpp".
$(VENV)/.built: $(VENV)/.tools setup.py scripts/cuda_toolkit.py $(CPP) $(CPP_DIRS)
	@echo "build: compiling what has changed (a first build takes a few minutes)"
	@$(BIN)/python setup.py -q build_ext --inplace 2>&1 | \
	    sed -u -E 's#^(\[[0-9]+/[0-9]+\]) .* -c [^ ]*/((csrc|python)/[^ ]+) .*#\1 \2#'
	@touch $@

# Editable, so Python files need no second install. After the build, which it then finds done.
$(VENV)/.installed: $(VENV)/.tools setup.py pyproject.toml | $(VENV)/.built
	@echo "install: coconet_ops into $(VENV), editable"
	@$(BIN)/python -m pip install -qq --no-build-isolation --no-deps -e .
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache $(VENV)/.built
	rm -f coconet_ops/*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
