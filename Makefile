# `make demo` and `make test` need nothing beforehand: they find an interpreter, make .venv, install and run.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# The interpreters that fit, best first. PYTHON=/path/to/python overrides the search.
PYTHON_VERSIONS := 3.12 3.13 3.14
ORACLE_PYTHON_VERSIONS := 3.11 3.12 3.10 3.13
EXTRAS ?= dev
# More arguments: make test ARGS="-k verify -x"
ARGS ?=
# Test processes. Most of the time goes into compiling, which one process does on one core. A file stays in one process,
# where its tests share models and compiled programs.
WORKERS ?= 2
PYTEST = $(PY) -m pytest -q -n $(WORKERS) --dist loadfile
PROMPT ?= def read_lines(path):

# Compiled programs are kept between runs, so the second run starts fast.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax

# The stamp's name covers all that decides what is installed, and the folder (an environment cannot be moved).
key = $(shell (cat $(1); echo "$(CURDIR) $(2)") | cksum | tr ' ' '-')
VENV := .venv
VENV_STAMP := $(VENV)/.installed-$(call key,pyproject.toml,$(EXTRAS))
PY := $(VENV)/bin/python

# PyTorch's CPU build is enough. Where pip would bring a CUDA build, point it to PyTorch's CPU index here:
# make oracles TORCH_PIP_ARGS="--index-url ..."
TORCH_PIP_ARGS ?=
ORACLES := tests/oracles
ORACLE_VENV := .venv-oracles
ORACLE_STAMP := $(ORACLE_VENV)/.installed-$(call key,$(ORACLES)/requirements.txt,$(TORCH_PIP_ARGS))
ORACLE_PY := $(ORACLE_VENV)/bin/python
ORACLE_OUT := .cache/oracles
DEEPSPEC ?=
ORACLE_SCRIPTS := $(addprefix $(ORACLES)/,v4_oracle.py tiny_v4.py make_goldens.py numerics_goldens.py dense_goldens.py \
	random_configs.py transformers_v4.py)

DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed-$(call key,docs/requirements.txt,)

.PHONY: help venv demo test test-long test-gpu test-gpus notebooks docs lint format oracles oracle-files clean

help:
	@echo "make demo       one prompt through the shipped model, speculative and plain decoding side by side"
	@echo "make test       the test suite"
	@echo "make test-long  the cases with large samples and many steps, and the live oracles"
	@echo "make test-gpu   the kernels' tests on an NVIDIA GPU (EXTRAS=dev,cuda12)"
	@echo "make test-gpus  the mesh on two NVIDIA GPUs or more: smoke, equal tokens, one process a GPU"
	@echo "make notebooks  every notebook from top to bottom"
	@echo "make docs       the pages and the API reference as HTML, in an environment of their own"
	@echo "make lint       ruff and pyright"
	@echo "make format     what ruff can mend by itself"
	@echo "make oracles    parity with PyTorch and transformers, in an environment of its own"
	@echo "make venv       only make .venv and install into it"
	@echo "make clean      remove the environments and caches"

$(VENV_STAMP):
	@python=$$(scripts/find_python.sh PYTHON $(PYTHON_VERSIONS)) && \
	scripts/make_venv.sh $(VENV) "$$python" $@ -e ".[$(EXTRAS)]"

venv: $(VENV_STAMP)

demo: $(VENV_STAMP)
	@$(VENV)/bin/dspark-jax generate --model nano --prompt "$(PROMPT)" --compare $(ARGS)

test: $(VENV_STAMP)
	$(PYTEST) $(ARGS)

test-long: $(VENV_STAMP) oracle-files
	$(PYTEST) -m "long or oracle" $(ARGS)

# One process: each would take most of the GPU's memory.
test-gpu: $(VENV_STAMP)
	@JAX_PLATFORMS=cuda $(PY) -c "import jax; jax.devices()" 2>/dev/null || { \
	echo "make test-gpu: JAX finds no NVIDIA GPU here. On a machine with one: make test-gpu EXTRAS=dev,cuda12 (or dev,cuda13)" >&2; \
	exit 2; }
	JAX_PLATFORMS=cuda,cpu $(PY) -m pytest -q -m "not oracle and not notebook" tests/kernels/test_*_lowerings.py tests/drafters/test_draw_kernel.py $(ARGS)

# NVLink multicast off: the first remedy of a hang (docs/pipeline.md).
test-gpus: export NCCL_NVLS_ENABLE ?= 0
test-gpus: $(VENV_STAMP)
	@JAX_PLATFORMS=cuda $(PY) -c "import jax; assert len(jax.devices()) > 1" 2>/dev/null || { \
	echo "make test-gpus: JAX finds fewer than two NVIDIA GPUs here. On a machine with several: make test-gpus EXTRAS=dev,cuda12 (or" \
	"dev,cuda13); for one GPU there is make test-gpu" >&2; \
	exit 2; }
	JAX_PLATFORMS=cuda $(PY) -m dspark_jax.cli bench mesh --parts smoke,equality --processes
	JAX_PLATFORMS=cuda,cpu $(PY) -m pytest -q -m "" -k b1_a_mesh_gives tests/serve/test_engine.py $(ARGS)

notebooks: $(VENV_STAMP)
	$(PYTEST) --dist load -m notebook tests/notebooks $(ARGS)

$(DOCS_STAMP): docs/requirements.txt
	@python=$$(scripts/find_python.sh PYTHON $(PYTHON_VERSIONS)) && \
	scripts/make_venv.sh $(DOCS_VENV) "$$python" $@ -r docs/requirements.txt

docs: $(DOCS_STAMP)  # strict: warnings are errors; written to .cache/site
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict

lint: $(VENV_STAMP)
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)

format: $(VENV_STAMP)
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

$(ORACLE_STAMP): $(ORACLES)/requirements.txt
	@python=$$(scripts/find_python.sh ORACLE_PYTHON $(ORACLE_PYTHON_VERSIONS)) && \
	scripts/make_venv.sh $(ORACLE_VENV) "$$python" $@ -r $(ORACLES)/requirements.txt $(TORCH_PIP_ARGS)

# One process a script; each writes its files only when all of its own checks pass.
$(ORACLE_OUT)/.written: $(ORACLE_STAMP) $(ORACLE_SCRIPTS)
	rm -rf $(ORACLE_OUT) && mkdir -p $(ORACLE_OUT)
	$(ORACLE_PY) $(ORACLES)/make_goldens.py $(ORACLE_OUT)/v4_tiny_goldens.npz
	$(ORACLE_PY) $(ORACLES)/numerics_goldens.py $(ORACLE_OUT)/v4_numerics_goldens.npz
	$(ORACLE_PY) $(ORACLES)/dense_goldens.py $(ORACLE_OUT)/dense_goldens.npz
	$(ORACLE_PY) $(ORACLES)/random_configs.py $(ORACLE_OUT)
	HF_HUB_OFFLINE=1 $(ORACLE_PY) $(ORACLES)/transformers_v4.py $(ORACLE_OUT)/transformers_v4.npz
	touch $@

# DeepSpec is in no package index: make oracles DEEPSPEC=/path/to/its/checkout compares with it too.
$(ORACLE_OUT)/deepspec_tiny.npz: $(ORACLE_OUT)/.written $(ORACLES)/deepspec_goldens.py
	$(ORACLE_PY) $(ORACLES)/deepspec_goldens.py "$(DEEPSPEC)" tests/data/deepspec_tiny $@

oracle-files: $(ORACLE_OUT)/.written $(if $(DEEPSPEC),$(ORACLE_OUT)/deepspec_tiny.npz)

oracles: $(VENV_STAMP) oracle-files
	$(PYTEST) --dist load -m oracle $(ORACLES) $(ARGS)  # few tests, most in one file

clean:
	rm -rf $(VENV) $(ORACLE_VENV) $(DOCS_VENV) .cache .pytest_cache .ruff_cache .hypothesis
