# pyggmlkv: every target works from a fresh clone and does only what is stale.
# Needed: make, Python >= 3.11 with venv, a C and C++ compiler. CMake and ninja come from the package index.
#
#   make build       .venv, ggml, the extension, the package with its extras
#   make demo        a real 135M model writes past its context window
#   make test        builds the reference too, then runs every test (PYTEST_ARGS="-k name")
#   make check       lint, format, types, layers, size budgets, C declarations
#   make reference   libllama from its pinned source, on our ggml (tests only)
#   make bench       side by side with the reference
#   make soak        the long random tests
#   make mutants     plants faults one at a time and shows that a test catches each
#   make clean       removes what the build made (not the model cache)

PYTHON      ?= python3
BACKENDS    ?=
EXTRAS      ?= text,dev
PYTEST_ARGS ?=
BUILD_ARGS  ?=

VENV   := .venv
PY     := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
CDEFS  := $(wildcard pyggmlkv/binding/cdef/*.h)
CHECKED := conftest.py pyggmlkv scripts tests ggml_build build_ggml.py setup.py

.PHONY: all build demo test check reference bench soak mutants clean FORCE
.DELETE_ON_ERROR:
.SUFFIXES:
all: build

# --- build -------------------------------------------------------------------------------------------------------

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("pyggmlkv needs Python 3.11 or newer, $(PYTHON) is %d.%d: make PYTHON=/path/to/python" % v[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) lacks venv (Debian: apt-get install python3-venv)" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build-tools: $(STAMPS)/venv pyproject.toml
	$(PY) -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"]))' > $(STAMPS)/build-requires.txt
	$(PY) -m pip install -q --disable-pip-version-check -r $(STAMPS)/build-requires.txt
	@touch $@

# Rewritten only when the choice of backends changes, so that a new choice rebuilds and the same choice does not.
$(STAMPS)/choice: $(STAMPS)/venv FORCE
	@echo "$(BACKENDS) $(BUILD_ARGS)" | cmp -s - $@ || echo "$(BACKENDS) $(BUILD_ARGS)" > $@

# Built again when its result was removed, whatever the stamp says.
$(STAMPS)/ggml: $(if $(wildcard pyggmlkv/_build_info.json),,FORCE) $(STAMPS)/build-tools $(STAMPS)/choice build_ggml.py $(wildcard ggml_build/*.py) $(CDEFS)
	$(PY) build_ggml.py $(if $(BACKENDS),--backends $(BACKENDS)) $(BUILD_ARGS)
	@touch $@

$(STAMPS)/package: $(STAMPS)/ggml pyproject.toml
	$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation -e ".[$(EXTRAS)]"
	@touch $@

build: $(STAMPS)/package

# --- use ---------------------------------------------------------------------------------------------------------

demo: build
	@$(PY) -m pyggmlkv.cli.demo

reference: build
	$(PY) scripts/build_reference.py

test: build reference
	$(PY) -m pytest $(PYTEST_ARGS)

soak: build reference
	$(PY) -m pytest -m soak $(PYTEST_ARGS)

mutants: build reference
	$(PY) scripts/mutants.py

bench: build reference
	$(PY) scripts/bench_llama.py
	$(PY) scripts/bench_memory.py
	$(PY) scripts/bench_state.py

check: build
	$(PY) -m ruff check $(CHECKED)
	$(PY) -m ruff format --check $(CHECKED)
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(PY) scripts/check_size.py
	$(PY) scripts/check_cdef.py

clean:
	rm -rf $(VENV) build dist pyggmlkv/_lib pyggmlkv/_ggml.c pyggmlkv/_ggml*.so pyggmlkv/_build_info.json
	rm -rf *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find pyggmlkv scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
