# make venv | demo | quick | test | rest | docs | cluster | slurm | chaos | lint | clean; needs git, make and Python 3.11 or newer.

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
MPI ?= mpich
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: venv demo quick test rest docs cluster slurm chaos lint clean

venv: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mpidp needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[$(MPI),progress,test,lint]'
	touch $@

demo: venv
	OMP_NUM_THREADS=1 $(BIN)/mpiexec -n 4 $(BIN)/python -m mpidp train jobs/digits.toml

# Linters on what was changed since the last commit, and the unit tests that start no process.
quick: venv
	$(BIN)/pre-commit run --files $$(git diff --name-only --diff-filter=d HEAD; git ls-files --others --exclude-standard)
	$(BIN)/python tests/run_tests.py --venv $(VENV) --mpi $(MPI) --ring quick

test: venv
	$(BIN)/python tests/run_tests.py --venv $(VENV) --mpi $(MPI) --ring test

# What `make test` leaves out: the other tests on 1, 2 and 4 ranks, and the longer failures.
rest: venv
	$(BIN)/python tests/run_tests.py --venv $(VENV) --mpi $(MPI) --ring rest

# The documentation site, in build/docs/index.html, and its tests. Any warning is an error.
docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --nitpicky --builder html docs build/docs
	$(BIN)/python -m pytest tests/docs/test_site.py

$(VENV)/installed-docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[docs]'
	touch $@

cluster: venv
	$(BIN)/python -m pytest -o faulthandler_timeout=300 tests/cluster

slurm: venv
	$(BIN)/python -m pytest -o faulthandler_timeout=300 tests/slurm

# Kills, stops, damage and flipped bits in numbers, two hours of them: KILLS, STOPS, POINTS and FLIPS make it shorter.
KILLS ?= 100
STOPS ?= 20
POINTS ?= 300
FLIPS ?= 50
# Open MPI asks before it runs as root, or more ranks than there are cores.
OPENMPI_ANYWHERE := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 \
	PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_mpi_yield_when_idle=1
chaos: venv
	$(BIN)/python tests/faults/chaos_kill.py --kills $(KILLS)
	$(BIN)/python tests/faults/chaos_stop.py --stops $(STOPS) --slows $(KILLS) --preemptions $(KILLS)
	$(BIN)/python tests/faults/chaos_checkpoint.py --points $(POINTS) --flips $(FLIPS)
	$(BIN)/python tests/faults/chaos_file.py --changes 1000
	OMP_NUM_THREADS=1 $(BIN)/mpiexec -n 3 $(BIN)/python tests/faults/chaos_flip.py --flips $(FLIPS)
	$(MAKE) venv VENV=.venv-openmpi MPI=openmpi
	$(OPENMPI_ANYWHERE) .venv-openmpi/bin/python tests/faults/chaos_kill.py --kills $(KILLS)
	$(OPENMPI_ANYWHERE) .venv-openmpi/bin/python tests/faults/chaos_stop.py --stops $(STOPS) --slows $(KILLS) --preemptions $(KILLS)
	$(OPENMPI_ANYWHERE) .venv-openmpi/bin/python tests/faults/chaos_shrink.py --kills $(KILLS)
	$(OPENMPI_ANYWHERE) .venv-openmpi/bin/python tests/faults/chaos_shrink.py --kills $(FLIPS) --sharded

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck jobs/*.sbatch {jobs,benchmarks,tests/cluster,tests/gpu,tests/slurm,tests/versions}/*.sh tests/cluster/host_shell

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
