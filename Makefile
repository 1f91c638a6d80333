# `make demo`, `docs`, `bench` and `test` set up their own virtual environment first; PYTHON=... chooses the interpreter for it.

VENV := .venv
BIN := $(VENV)/bin
SOURCES := sar tests examples benchmarks tools setup.py
FAST := test_architecture.py test_graphs.py test_mutants.py comm/test_collectives.py core/graph \
  core/test_agreement.py core/test_attention.py core/test_late_messages.py core/test_pruned_backward.py nn parity/test_layers.py \
  parity/test_values.py parity/test_conv_layers.py::test_python_functions_in_many_tiles sampling/test_blocks.py \
  sampling/test_seeds.py sampling/test_training.py storage/test_partition_reader.py partition/test_write.py \
  cli/test_inspect.py

# `make test` runs two parts side by side, as most tests use one core: these, and all others. Of the others, those that compile
# most come last: by then the first part has left the kernels in the cache.
ENGINE := $(addprefix tests/,kernels core nn parity host storage adapters)
COMPILING := $(addprefix tests/,sampling train combinations examples pages benchmarks)
OTHERS := $(filter-out $(ENGINE) $(COMPILING),$(wildcard tests/test_*.py) $(patsubst %/__init__.py,%,$(wildcard tests/*/__init__.py)))
PART = $(if $(findstring engine,$@),$(ENGINE),$(OTHERS) $(COMPILING))
# Tests of the engine, and with `--virtual 1` all that have workers.
ON_WORKERS = $(addprefix tests/,core nn parity comm $(if $(findstring x,$*),,storage adapters sampling train))
VIRTUAL := $(addprefix .virtual-,2x4 1 1x5 2x2)
SIDE_BY_SIDE = @$(MAKE) --jobs 2 --no-print-directory
# Each line of a part's output begins with the part's name; the status is that of pytest, not of sed.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
NAMED = | sed -u 's/^/$(subst .,,$@): /'

.PHONY: venv demo docs bench test .test-engine .test-others .all-engine .all-others test-fast .fast-kernels .fast-rest test-all \
  test-virtual mutants check clean

venv: $(VENV)/.made

demo: $(VENV)/.installed-plot
	$(BIN)/sar demo

# The site, into site/; a broken link or a docstring that cannot be read is an error.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Options: BENCH="--graph rmat --repeats 5"; docs/benchmarks.md lists the other benchmarks.
bench: $(VENV)/.installed-plot
	$(BIN)/python -m benchmarks $(BENCH)

test: $(VENV)/.installed-test
	$(SIDE_BY_SIDE) .test-engine .test-others

.test-engine .test-others:
	@$(BIN)/python -m pytest -q -m "not slow" $(PART) $(NAMED)

# Kernels, frames, the engine against DGL, mini-batches, and directories written and read, on up to two workers: within three
# minutes on two cores, compiling included. Random cases are fewer than in `make test`.
test-fast: $(VENV)/.installed-test
	$(SIDE_BY_SIDE) .fast-kernels .fast-rest

.fast-kernels .fast-rest:
	@$(BIN)/python -m pytest -q -m "not slow" --most-workers 2 --hypothesis-profile fast \
	  $(addprefix tests/,$(if $(filter .fast-kernels,$@),kernels,$(FAST))) $(NAMED)

# All tests, those of the engine with virtual workers, too, and which lines and branches of sar/ they reach, child processes
# included; kernels are compiled anew, as their making is measured too. Then the mutants.
test-all: $(VENV)/.installed-test
	rm -rf .coverage .coverage.* $(VENV)/kernels
	$(SIDE_BY_SIDE) --keep-going .all-engine .all-others $(VIRTUAL); status=$$?; \
	  $(BIN)/coverage combine --quiet; $(BIN)/coverage report; exit $$status
	$(MAKE) mutants

.all-engine .all-others:
	@NUMBA_CACHE_DIR=$(CURDIR)/$(VENV)/kernels $(BIN)/coverage run -m pytest -q --hypothesis-profile all $(PART) $(NAMED)

# The tests once more, with virtual workers: all those of a test in one process, or V in each of W processes (`WxV`).
test-virtual: $(VENV)/.installed-test
	$(SIDE_BY_SIDE) --keep-going $(VIRTUAL)

.virtual-%:
	@$(BIN)/coverage run -m pytest -q --virtual $* $(ON_WORKERS) $(NAMED)

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
