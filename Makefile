# Everything a contributor types. `make demo` and `make test` need Python 3.11 and a C++ compiler, nothing else.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# `make test TORCH=2.15.0` runs the tests on that version, in an environment of its own.
TORCH ?= 2.13.0
OTHER_TORCH := $(filter-out 2.13.0,$(TORCH))
VENV := .venv$(if $(OTHER_TORCH),-$(OTHER_TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-all lint gpu-test sanitize bench models docs

setup: $(READY)

# torch stands first, so that pip resolves the rest around it.
# Another torch goes with another Triton, which is left to pip.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(OTHER_TORCH),/^torch==/d; /^triton==/d)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt torch==$(TORCH)
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt torch==$(TORCH) -e '.[transformers,triton,dev]'
	touch $(READY)

demo: setup
	$(BIN)/attn-ops run --dump out/demo

# Tests run in as many processes as there are cores, each with one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test: setup
	$(PYTEST) -m "not gpu and not slow"

test-all: setup
	$(PYTEST) -m "not gpu"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

gpu-test: setup
	$(BIN)/python -m pytest -m gpu

sanitize: setup
	PYTHON=$(BIN)/python bash tests/gpu/sanitize.sh

models: setup
	$(BIN)/python -m benchmarks.model_types --page docs/models.md

bench: setup
	$(BIN)/python -m benchmarks.decode_step
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.graphs
	$(BIN)/python -m benchmarks.fast_prefill

docs: setup
	$(BIN)/python -m attn_ops.support_table docs/backends.md
	$(BIN)/python docs/images/layers.py
