# thinwire: `make demo` and `make test` need nothing installed but Python 3.11 or newer.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help install demo docs dist test test-integrations test-kernels test-gpu test-jit-off test-nightly house lint format clean

help:            ## list the verbs
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(STAMP) ## make .venv and install thinwire with everything it can use
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: install    ## compare stock DDP and thinwire on four emulated hosts, in about a minute
	$(BIN)/thinwire demo

lint: install    ## ruff and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

test: lint       ## lint, types, and every test that needs no GPU
	$(BIN)/python -m pytest -m "not gpu and not slow and not docs and not integrations" -n 2 --dist worksteal

test-integrations: $(VENV)/.integrations ## train with each framework of the extra `integrations`, stock and with thinwire
	$(BIN)/python -m pytest -m "integrations" tests/integrations

$(VENV)/.integrations: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,integrations]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --force-reinstall fbgemm-gpu-cpu # over the CUDA build that torchrec asks for
	@touch $@

# Triton is no part of the environment: 286 MB to download and 1 GB on disk (10 s from a mirror, and minutes from a slow
# link) of `make install` and `make demo`, and packages that find it, as torch.compile does, would no longer be tested as
# a user without a GPU has them. The oldest version that the kernels support, that of torch 2.9, and the newest one:
TRITONS := 3.5.1 3.9.0

test-kernels: $(TRITONS:%=$(VENV)/triton-%) ## the kernels for GPUs, without one: compile them for each architecture, and interpret them
	$(BIN)/python -m pytest -m "slow" -n 2 tests/aot
	PYTHONPATH=$(lastword $^) $(BIN)/python -m pytest -m "slow" -n 2 --dist worksteal tests/unit/test_gpu_kernels.py

$(VENV)/triton-%: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ triton==$*
	@touch $@

test-gpu: install ## what needs a GPU: its tests and times, on one page to send back, benchmarks/results/gpu.md
	$(BIN)/python benchmarks/gpu_page.py --output benchmarks/results/gpu.md

test-jit-off: install ## the kernels as plain Python, which coverage tools can see
	NUMBA_DISABLE_JIT=1 $(BIN)/python -m pytest tests/unit/test_kernels.py tests/unit/test_kernel_parity.py tests/unit/test_kernel_sums.py

test-nightly: install $(TRITONS:%=$(VENV)/triton-%) ## the slow tests: full demo, benchmark figures, long fuzzing
	$(BIN)/python -m pytest -m "slow"
	THINWIRE_EXAMPLES=300 $(BIN)/python -m pytest -m "not gpu and not slow and not docs and not integrations" -n 2 --dist worksteal tests/unit

docs: install    ## build the site into site/, failing on any warning; run its notebook and its commands, made small
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m pytest -m "docs" -n 2 --dist worksteal tests/docs

dist: install    ## build the wheel and the sdist into dist/, and check them as PyPI does
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

house: install   ## measure the structure of the library: files on the way of a gradient, sizes, circles, duplicate names
	$(BIN)/python tools/house.py

format: install  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:           ## remove everything that make created
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis dist build
