# Targets set themselves up: `make test` and `make demo` work in a fresh clone with nothing but python3 (3.10 or newer).
SHELL := /bin/bash
PYTHON ?= python3
# The torch to test with: `make TORCH=2.14 test` has an environment of its own.
TORCH ?= 2.13
VENV := .venv/$(TORCH)
CONSTRAINTS := constraints-torch$(TORCH).txt
# LOCKED=1 installs these files and no others: on Linux, x86_64 and Python 3.11, which continuous integration has.
LOCK := locked-torch$(TORCH).txt
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
FUZZ_ARGS ?= --programs 2000
MUTATE_ARGS ?= --mutants 500 --processes 2
PYTEST_ARGS ?=

.PHONY: venv lock test test-all lint types pytest prove docs pages fuzz mutate demo gpu-test gpu-sanitize clean

venv: $(STAMP)

# The stamp is written last, so that an interrupted installation is done again.
$(STAMP): pyproject.toml constraints.txt $(CONSTRAINTS) $(LOCK)
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(PIP) --require-hashes -r $(LOCK)
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(PIP) -c $(CONSTRAINTS) -e '.[test,demo]'
endif
	touch $@

# Once constraints change.
lock:
	$(PYTHON) -m tests.lock $(TORCH)

# pytest's own selection leaves out what needs a GPU and what is marked slow or thorough; test-all leaves out the first
# alone.
test: PYTEST_ARGS = --thin 6
test: lint types pytest

test-all: PYTEST_ARGS = -m "not gpu"
test-all: lint types pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# One thread per worker: two workers that each start a thread per core would only get in each other's way.
pytest: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 $(PYTEST_ARGS)

# The identities that operators, forms and fusions rest on: all of them, with those marked thorough.
prove: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu" tests/proofs $(PYTEST_ARGS)

# The site, in site/. A broken link or anchor is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(STAMP)
	$(BIN)/python -m mkdocs build

# The pages that are written by the code.
pages: $(STAMP)
	$(BIN)/python -m mhc_compile.generated_pages
	$(BIN)/python -m tests.passes.forms
	$(BIN)/python -m tests.walkthrough

# Some twenty minutes on a core of its own; what is wrong is printed as a program that runs. Another --seed draws other programs.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

# An hour on two cores for which tests judge which mutants, which is kept in judges/, and up to two minutes for a mutant
# on one core. Judged mutants are in mutants.jsonl, and not judged again.
mutate: $(STAMP)
	$(BIN)/python -m tests.mutation $(MUTATE_ARGS)

demo: $(STAMP)
	$(BIN)/python examples/compile_deepseek_v4.py

# These use the interpreter on PATH as it is: a CUDA machine usually brings its own torch.
gpu-test:
	$(PYTHON) -m pytest -q -m gpu $(PYTEST_ARGS)

gpu-sanitize:
	$(PYTHON) -m tests.kernels.sanitize

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
