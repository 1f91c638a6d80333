# `make demo`, `docs`, `bench` and `test` set up their own virtual environment first; PYTHON=... chooses the interpreter for it.

VENV := .venv
BIN := $(VENV)/bin
SOURCES := sar tests examples benchmarks tools setup.py
# Three processes, as tests wait for workers, take the tests of one file after the other from one queue, the longest first
# (tests/durations.txt).
QUEUE := -m pytest -q --numprocesses 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 2
FAST := kernels test_architecture.py test_mutants.py comm/test_collectives.py core/graph \
  core/test_agreement.py core/test_attention.py core/test_traffic.py core/test_pruned_backward.py nn parity/test_layers.py \
  parity/test_values.py parity/test_conv_layers.py::test_python_functions_in_many_tiles sampling/test_blocks.py \
  sampling/test_seeds.py sampling/test_training.py data/test_partition_reader.py partition/test_write.py \
  cli/test_inspect.py
# With `--virtual WxV`: tests of the engine; with `--virtual W`: all that have workers.
ON_WORKERS = $(addprefix tests/,core nn parity comm $(if $(findstring x,$*),,adapters partition sampling data train))
VIRTUAL := $(addprefix .virtual-,1 1x5 2x2)

.PHONY: venv demo docs bench test test-pyg313 .pyg durations test-fast test-all .all test-virtual $(VIRTUAL) mutants check clean

venv: $(VENV)/.made

demo: $(VENV)/.installed-all
	$(BIN)/sar demo

# The site, into site/; a broken link or a docstring that cannot be read is an error.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Options: BENCH="--graph rmat --repeats 5"; docs/benchmarks.md lists the other benchmarks.
bench: $(VENV)/.installed-all
	$(BIN)/python -m benchmarks $(BENCH)

# Tests that fail run once more, alone: on a busy machine a process may miss a limit in seconds. Both runs are printed.
test: $(VENV)/.installed-test
	$(BIN)/python $(QUEUE) -m "not slow" || $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none -m "not slow"

# On Python 3.13, for which DGL has no build: what compares with DGL is skipped, and the pages of PyTorch Geometric are run.
test-pyg313:
	$(MAKE) VENV=.venv313 PYTHON="$(or $(PYTHON),python3.13)" .pyg

.pyg: $(VENV)/.installed-test
	$(BIN)/python $(QUEUE) -m "not slow"
	$(BIN)/python $(QUEUE) tests/pages/test_blocks.py tests/parity tests/adapters tests/cli -k "pyg or without_dgl"

# Writes tests/durations.txt anew, on a machine that does nothing else.
durations: $(VENV)/.installed-test
	$(BIN)/python $(QUEUE) -m "not slow" --record-durations

# Kernels, frames, the engine against DGL, mini-batches, and directories written and read, on up to two workers: within three
# minutes on two cores, compiling included. Random cases are fewer than in `make test`.
test-fast: $(VENV)/.installed-test
	$(BIN)/python $(QUEUE) -m "not slow" --most-workers 2 --hypothesis-profile fast $(addprefix tests/,$(FAST))

# All tests, with workers as processes and those of the engine with virtual workers, too, and which lines and branches of sar/
# they reach, child processes included; kernels are compiled anew, as their making is measured too. Then the mutants.
test-all: $(VENV)/.installed-test
	rm -rf .coverage .coverage.* $(VENV)/kernels
	$(MAKE) --keep-going .all $(VIRTUAL); status=$$?; $(BIN)/coverage combine --quiet; $(BIN)/coverage report; exit $$status
	$(MAKE) mutants

.all:
	NUMBA_CACHE_DIR=$(CURDIR)/$(VENV)/kernels $(BIN)/coverage run $(QUEUE) --hypothesis-profile all --processes

# The tests of `make test` once more, with virtual workers: all of a test in one process, or V in each of W processes (`WxV`).
test-virtual: $(VENV)/.installed-test
	$(MAKE) --keep-going $(VIRTUAL)

$(VIRTUAL): .virtual-%:
	$(BIN)/coverage run $(QUEUE) -m "not slow" --virtual $* $(ON_WORKERS)

# Breaks central lines, one at a time, and checks that a fast test fails on each.
mutants: $(VENV)/.installed-test
	$(BIN)/python tools/mutate.py

check: $(VENV)/.installed-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

# The files .made and .installed-EXTRA record what is done; installing one extra keeps the others.
$(VENV)/.made:
	@PYTHON="$(PYTHON)" sh tools/make_venv.sh $(VENV)
	@touch $@

$(VENV)/.installed-%: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@
