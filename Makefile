# make train   set up and train the quickstart model on 4 ranks
# make test    set up and run the tests
# make test-slurm  submit jobs to a SLURM that is installed and started here (Debian, as root)
# make check   set up and run lint and types
# make format  rewrite files in the house format
#
# Everything is installed into .venv in this folder; nothing outside it is touched.
# RANKS and ARGS change what `make train` runs: make train RANKS=2 ARGS="--set precision=fp32"

PYTHON ?= python3
RANKS ?= 4
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# A PYTHONPATH of the user's would come before this checkout.
export PYTHONPATH :=
# One thread a rank: ranks are the parallelism, and the bits depend on it.
export OMP_NUM_THREADS := 1

.PHONY: train test test-slurm check format clean

train: $(VENV)/run.stamp
	$(BIN)/mpirun -n $(RANKS) $(BIN)/python -m axsparse.train --config quickstart.yaml $(ARGS)

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(ARGS)

test-slurm: $(VENV)/test.stamp
	$(BIN)/python -m pytest tests/slurm $(ARGS)

check: $(VENV)/dev.stamp
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

format: $(VENV)/dev.stamp
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "axsparse needs Python 3.10 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing axsparse into $(VENV) (torch is a large download the first time)"
	$(PIP) --editable '.[mpich]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	$(PIP) --editable '.[mpich,fast,images,text,test]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/test.stamp
	$(PIP) --editable '.[dev]'
	@touch $@
