# `make demo` and `make test` work on a fresh machine: the first makes .venv and installs, the next ones install nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-fast tutorials fuzz lint docs clean

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

lint: $(INSTALLED)
	$(BIN)/ruff check .

docs: $(INSTALLED)
	$(BIN)/python docs/reference.py build/docs

clean:
	rm -rf $(VENV) build *.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[hf,viz,docs,tutorials,test]"
	touch $@
