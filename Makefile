# make venv | demo | test | cluster | slurm | lint | clean; needs git, make and Python 3.11 or newer.

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
MPI ?= mpich
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: venv demo test cluster slurm lint clean

venv: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mpidp needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[$(MPI),progress,test,lint]'
	touch $@

demo: venv
	OMP_NUM_THREADS=1 $(BIN)/mpiexec -n 4 $(BIN)/python -m mpidp train jobs/digits.toml

test: venv
	$(BIN)/python tests/run_tests.py --venv $(VENV) --mpi $(MPI)

cluster: venv
	$(BIN)/python -m pytest tests/cluster

slurm: venv
	$(BIN)/python -m pytest -o faulthandler_timeout=300 tests/slurm

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck jobs/*.sbatch jobs/*.sh tests/slurm/*.sh

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
