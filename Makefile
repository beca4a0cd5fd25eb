# Everything people do. Each target sets up what it needs in .venv, and is quick the second time.
#
#   make demo     train a model on 4 replicas           REPLICAS=4 EPOCHS=5 STRATEGY=mirrored (or tpu)
#   make test     the quick tests, in minutes           ARGS="-k collectives" runs all cases of those
#   make test-full      lint, make test, the cases it leaves out, the site, the oldest versions, programs for TPUs
#   make baseline    200 programs on the library of 2026-11-27 and on this one, bit by bit   BASE=HEAD~1 for another one
#   make keras-table 60 trainings beside one device, and beside what they computed before   ARGS="--only tiny --values"
#   make test-clients   published libraries on our strategies, in .venv-clients: a few minutes
#   make test-aot       each kind of program compiled for TPUs and GPUs that are not there, in .venv-aot
#   make test-aot-short   some of them for TPUs, beside the environment of make test
#   make test-gpu       what needs GPUs; without them each part is skipped by name
#   make test-network   jobs on hosts out of network namespaces, disturbed: needs root and `ip`, 40 minutes
#   make matrix   the versions of TensorFlow, Keras, jax and Python that matter   ARGS="--tags oldest"
#   make lint     ruff, mypy, import order
#   make bench    the benchmarks                     ARGS="--quick" or ARGS="--only eager_run,launch"
#   make soak     faults, load, trainings: four hours  SOAK="--injections 1000 --only faults"
#   make docs     the documentation, into site/; make docs-serve shows it while you write
#   make test-docs   builds it, and opens every page in headless Chromium
#   make wheel    build the wheel, and import it from an empty environment
#   make clean    remove .venv, .venv-aot, .venv-clients and everything built
#
#   TENSORFLOW=tensorflow-cpu (of any target) installs that in place of tensorflow

PYTHON ?= python3
REPLICAS ?= 4
EPOCHS ?= 5
STRATEGY ?= mirrored
ARGS ?=
BASE ?= ca07723f
TENSORFLOW ?= tensorflow
SOAK ?= --report

VENV := .venv
BIN := $(VENV)/bin
# Where pip runs this often, its version check and cache talk are noise.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help demo test test-full baseline keras-table test-aot test-aot-short test-clients test-gpu test-network matrix lint format bench soak docs docs-serve test-docs wheel clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
	  { echo "Python 3.11 to 3.14 is needed, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	         "Name another one: make PYTHON=python3.12 ..."; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# What the demo needs; TPUStrategy needs jax as well.
COMMA := ,
DEMO_EXTRAS := demo$(if $(filter tpu,$(STRATEGY)),$(COMMA)xla)

# Two packages have the files of TensorFlow. An environment has one of them, so the other goes first.
$(VENV)/.$(TENSORFLOW): | $(BIN)/python
	@rm -f $(VENV)/.tensorflow* $(VENV)/.extras-*
	@$(PIP) --quiet uninstall --yes $(filter-out $(TENSORFLOW),tensorflow tensorflow-cpu)
	@touch $@

# One stamp a set of extras; made again when the metadata changes.
$(VENV)/.extras-%: pyproject.toml $(VENV)/.$(TENSORFLOW) | $(BIN)/python
	@echo "installing replica_engine[$*] into $(VENV) ($(TENSORFLOW) takes a minute or two the first time)"
	@$(PIP) install --editable ".[$(TENSORFLOW),$*]"
	@touch $@

demo: $(VENV)/.extras-$(DEMO_EXTRAS)
	@TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python -m examples.demo --strategy $(STRATEGY) --replicas $(REPLICAS) --epochs $(EPOCHS) $(ARGS)

# TPUStrategy is tested wherever jax can be installed.
TEST_EXTRAS := test$(COMMA)xla

test: $(VENV)/.extras-$(TEST_EXTRAS)
	$(BIN)/python -m pytest $(ARGS)

# What CI runs. A failure of lint or of the quick tests comes first.
test-full:
	$(MAKE) lint
	$(MAKE) test ARGS=--portable
	$(MAKE) test ARGS="--tier rest"
	$(MAKE) test-docs ARGS=
	$(MAKE) matrix ARGS="--tags oldest"
	if $(MAKE) $(LIBTPU); then $(MAKE) test-aot-short ARGS=; \
	else echo "The compiler of TPUs could not be installed: no program was compiled for them."; fi

# Both libraries run in one environment, on one machine: other processors have other bits. What may differ stands in
# tests/baseline/allowed.py.
baseline: $(VENV)/.extras-$(TEST_EXTRAS)
	rm -rf build/base
	mkdir -p build/base
	git archive $(BASE) replica_engine | tar -x -C build/base
	PYTHONPATH=.:tests $(BIN)/python -m tests.baseline --base build/base $(ARGS)

keras-table: $(VENV)/.extras-$(TEST_EXTRAS)
	PYTHONPATH=.:tests $(BIN)/python -m tests.keras_table $(ARGS)

# Libraries that pin what they were released with, some of them years ago: an environment of their own, installed without
# regard to those pins. Those that need Keras 2 run in a process of their own, since TensorFlow has one Keras a process.
CLIENTS := .venv-clients

$(CLIENTS)/.installed: pyproject.toml tests/clients/requirements.txt | $(BIN)/python
	@echo "installing the libraries of tests/clients/requirements.txt into $(CLIENTS)"
	@$(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install --editable ".[$(TENSORFLOW),$(TEST_EXTRAS)]"
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps \
	  --requirement tests/clients/requirements.txt
	@touch $@

test-clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest --tier all tests/clients/test_sonnet.py tests/clients/keras_3 $(ARGS)
	TF_USE_LEGACY_KERAS=1 $(CLIENTS)/bin/python -m pytest --tier all tests/clients/keras_2 $(ARGS)

# Compilers of chips that are not there: libtpu takes 700 MB, and jax looks for TPUs where it is installed. So they have an
# environment of their own.
AOT := .venv-aot

$(AOT)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing the compilers of TPUs and GPUs into $(AOT)"
	@$(BIN)/python -m venv $(AOT)
	@$(AOT)/bin/python -m pip --disable-pip-version-check --quiet install --editable ".[$(TENSORFLOW),$(TEST_EXTRAS),aot]"
	@touch $@

test-aot: $(AOT)/.installed
	rm -rf build/programs
	KEPT_PROGRAMS=build/programs $(AOT)/bin/python -m pytest --quiet --tier all tests/xla
	KEPT_PROGRAMS=build/programs $(AOT)/bin/python -m pytest --tier all tests/aot $(ARGS)

# Some of it with the environment of `make test`, and the compiler of TPUs beside it, as `make bench` has it too.
LIBTPU := build/libtpu

$(LIBTPU): $(VENV)/.extras-$(TEST_EXTRAS)
	@echo "installing the compiler of TPUs into $(LIBTPU)"
	@$(PIP) install --no-deps --target $@ "$$($(BIN)/python -c 'from importlib.metadata import requires; \
	  print(*[each.partition(";")[0] for each in requires("jax") if each.startswith("libtpu")])')"

test-aot-short: $(LIBTPU)
	PYTHONPATH=$(LIBTPU) $(BIN)/python -m pytest --quiet \
	  tests/aot/test_bodies.py -k "v5e and (kernel or all_reduces or gradient_of_a_loop or conv2d or transformer)" $(ARGS)

# With what is installed: on a machine with GPUs, install the extra cuda as well.
test-gpu: $(VENV)/.extras-$(TEST_EXTRAS)
	$(BIN)/python -m pytest -n 0 --verbose --tier all tests/gpu $(ARGS)

# Hosts with addresses of their own, cables pulled, partitions; writes the table of docs/reliability.md.
test-network: $(VENV)/.extras-$(TEST_EXTRAS)
	$(BIN)/python -m pytest -n 0 --verbose --tier all -o faulthandler_exit_on_timeout=false tests/network $(ARGS)

# Each cell in a fresh environment; what it came to goes into docs/versions.md.
matrix: $(VENV)/.extras-matrix
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/nox $(ARGS)  # where uv is too

lint: $(VENV)/.extras-$(TEST_EXTRAS) $(VENV)/.extras-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.extras-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.extras-demo$(COMMA)xla$(COMMA)plot $(LIBTPU)
	$(BIN)/python -m benchmarks --libtpu $(CURDIR)/$(LIBTPU) $(ARGS)

soak: $(VENV)/.extras-$(TEST_EXTRAS)
	$(BIN)/python -m soak $(SOAK)

# The theme's notice about its successor is nothing for people who build.
docs: $(VENV)/.extras-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

docs-serve: $(VENV)/.extras-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --livereload

test-docs: docs $(VENV)/.extras-docs-test
	$(BIN)/python -m pytest --confcutdir tests/site --numprocesses 2 tests/site $(ARGS)

wheel: $(BIN)/python
	@$(PIP) install build
	rm -rf dist build/wheel-check
	$(BIN)/python -m build --wheel --outdir dist
	$(PYTHON) -m venv build/wheel-check
	build/wheel-check/bin/python -m pip --disable-pip-version-check --quiet install "$$(echo dist/*.whl)[$(TENSORFLOW)]"
	cd build && wheel-check/bin/python -c \
	  'import replica_engine as r; print(r.__version__, r.MirroredStrategy(["CPU:0"]).run(lambda x: x + 1, args=(1,)))'

clean:
	rm -rf $(VENV) $(AOT) $(CLIENTS) .nox build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
