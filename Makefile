# Everything sets itself up: a virtual environment in .venv with the tested versions of .constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test lint serve clean

$(VENV)/.runtime: pyproject.toml .constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c .constraints.txt -e .
	touch $@

$(VENV)/.tests: $(VENV)/.runtime
	$(PIP) install -c .constraints.txt -e ".[test,bench]"
	touch $@

# Generates text with the bundled model; no download but the Python packages.
demo: $(VENV)/.runtime
	$(BIN)/python -m engine.demo

# One thread a process: two busy processes are faster than one whose threads wait for each other.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(VENV)/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Serves the bundled model on http://127.0.0.1:8000 with one process.
serve: $(VENV)/.runtime
	$(BIN)/python -m engine.launch

clean:
	rm -rf $(VENV) .cache build *.egg-info
