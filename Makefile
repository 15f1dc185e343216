# `make demo` and `make test` work on a fresh machine: the first makes .venv and installs, the next ones install nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-fast tutorials fuzz spellings zoo lint docs wheel clean

demo: $(INSTALLED)
	$(BIN)/stof demo

test: $(INSTALLED) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=15

test-fast: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

tutorials: $(INSTALLED)
	$(BIN)/python tutorials/run.py

# The long forms of what `make test` does briefly: 100,000 mutated inputs, 50 kills, 10,000 calls.
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.robustness.fuzz
	STOF_ROBUSTNESS=long $(BIN)/python -m pytest -n 2 tests/robustness

# 20,000 random programs near attention, norms, gates, slices and casts, against PyTorch in float64: hours on two cores.
SEED ?= 1
PROGRAMS ?= 20000
JOBS ?= 2
spellings: $(INSTALLED)
	$(BIN)/python -m tests.robustness.spellings --seed $(SEED) --programs $(PROGRAMS) --jobs $(JOBS)

# Some eighty architectures of transformers and diffusers against PyTorch.
zoo: $(INSTALLED)
	$(BIN)/python -m tests.models.zoo

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# dist/*.whl, then the demo from it: in an empty environment of its own, in a folder outside the tree.
wheel: $(INSTALLED)
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	$(PYTHON) tests/try_wheel.py dist/*.whl constraints.txt

docs: $(INSTALLED)
	$(BIN)/python docs/site.py build/docs

clean:
	rm -rf $(VENV) build dist *.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[hf,viz,docs,tutorials,test,dev]"
	touch $@
