# `make demo`, `make bench` and `make test` set up their own virtual environment first; PYTHON=... chooses the interpreter for it.

VENV := .venv
BIN := $(VENV)/bin
SOURCES := sar tests examples benchmarks
FAST := test_architecture.py test_graphs.py kernels comm/test_collectives.py core/test_agreement.py core/test_attention.py \
  core/graph core/test_used_graphs.py nn parity/test_conv_layers.py parity/test_values.py

.PHONY: venv demo bench test test-fast test-all check clean

venv: $(VENV)/.made

demo: $(VENV)/.installed-plot
	$(BIN)/sar demo

# Options: BENCH="--graph rmat --repeats 5"; docs/benchmarks.md lists the other benchmarks.
bench: $(VENV)/.installed-plot
	$(BIN)/python -m benchmarks $(BENCH)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not slow"

# Kernels, frames, and the engine against DGL on up to two workers, within three minutes.
test-fast: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not slow" --most-workers 2 $(addprefix tests/,$(FAST))

test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest

check: $(VENV)/.installed-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

# The files .made and .installed-EXTRA record what is done; installing one extra keeps the others.
$(VENV)/.made:
	@PYTHON="$(PYTHON)" sh tools/make_venv.sh $(VENV)
	@touch $@

$(VENV)/.installed-%: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@
