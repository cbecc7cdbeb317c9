# thinwire: `make demo` and `make test` need Python 3.11 or newer, and download all else into .venv; how much is said in
# docs/start/install.md.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := $(VENV)/.torch
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.demo

.PHONY: help install demo site docs dist kernels test test-all test-slow test-integrations test-kernels test-gpu \
  test-jit-off test-torches test-nightly house lint format clean

help:            ## list the verbs
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(STAMP) ## make .venv and install thinwire with everything it can use
$(STAMP): pyproject.toml constraints.txt | $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP) $(DEMO)

demo: $(DEMO)    ## compare stock DDP and thinwire on four emulated hosts, in about a minute; it installs what that needs
	$(BIN)/thinwire demo
	@echo "thinwire is in $(BIN): first run  . $(BIN)/activate"

$(DEMO): pyproject.toml constraints.txt | $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[cpu,plot,testbed]'
	@touch $(DEMO)

$(TORCH):
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/thinwire || $(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	@$(BIN)/python tools/install_torch.py
	@touch $(TORCH)

lint: install    ## ruff and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

# Each law on all pairs of its parameters, and few examples of what hypothesis draws: see tests/common/plugins/selection.py.
# Three workers on two cores, since ranks wait for each other, for links and for limits: they leave 3 % of the cores idle.
# A fourth takes 307 s to 363, and slow tests 1,692 to 1,746: it starts, imports and collects like the others, and all of them wait for a core.
# What fails runs once more, alone; what passes then is named last, as flaky.
SUITE  := $(BIN)/python tools/suite.py
WORKERS := 3
# Asserts are not rewritten, which takes a worker 10 s to load; what fails runs again with rewritten ones, for its values.
SHARED := -n $(WORKERS) --dist worksteal --durations=10 --assert=plain
PYTEST := $(SUITE) $(SHARED)
QUICK  := -m "not gpu and not slow and not docs and not integrations" --pairs
REST   := -m "not gpu and not docs and not integrations" --rest --ignore=tests/aot --ignore=tests/house/test_gpu_page.py

# Where PYTHONDONTWRITEBYTECODE is set, each process that a test starts would compile the sources: 0.4 s of processor.
kernels: install ## compile the kernels for this processor, once, on all cores
	@$(BIN)/python -m compileall -q -j 0 src tests
	$(BIN)/python tools/compile_kernels.py

test: lint kernels ## lint, types, and each behaviour once, in 3 to 6 minutes on 2 cores
	THINWIRE_EXAMPLES=25 $(PYTEST) $(QUICK)

PARTS := test test-slow test-integrations docs dist test-kernels test-jit-off test-torches
test-all: $(or $(PART),$(PARTS)) ## every test that needs no GPU; PART="docs test-slow": these parts of it

test-slow: kernels ## what starts programs, repeats faults or takes long, and all combinations of parameters; SHARE=1/4: a quarter
	$(PYTEST) $(REST) $(if $(SHARE),--part $(SHARE))

test-integrations: $(VENV)/.integrations kernels ## train with each framework of the extra `integrations`, stock and with thinwire
	$(SUITE) -m "integrations" -n 2 --dist loadscope tests/integrations

$(VENV)/.integrations: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,integrations]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --force-reinstall fbgemm-gpu-cpu # over the CUDA build that torchrec asks for
	@touch $@

# Triton is no part of the environment: 286 MB to download and 1 GB on disk (10 s from a mirror, and minutes from a slow
# link) of `make install` and `make demo`, and packages that find it, as torch.compile does, would no longer be tested as
# a user without a GPU has them. The oldest version that the kernels support, that of torch 2.9, and the newest one:
TRITONS := 3.5.1 3.9.0

test-kernels: $(TRITONS:%=$(VENV)/triton-%) ## what is for GPUs, without one: compile and interpret the kernels, and run test-gpu dry
	PYTHONPATH=$(lastword $^) $(SUITE) -m "slow" -n $(WORKERS) --dist worksteal --pairs \
	  tests/house/test_gpu_page.py tests/aot tests/kernels/test_gpu_kernels.py

$(VENV)/triton-%: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ triton==$*
	@touch $@

test-gpu: ## what needs a GPU: its tests and times, on one page to send back; with the torch of PYTHON, without installing
	$(PYTHON) benchmarks/gpu_page.py --output benchmarks/results/gpu.md

UNCOMPILED := $(addprefix tests/kernels/,reference test_kernel_parity.py $(addprefix cpu/test_,codes.py ids.py rows.py sum.py union.py))

test-jit-off: install ## the kernels as plain Python, which coverage tools can see
	NUMBA_DISABLE_JIT=1 $(SUITE) $(UNCOMPILED)

# The oldest and the newest torch, each in an environment of its own; another Python by PYTHON=python3.13 in a fresh clone.
TORCHES := 2.11 2.15
# Without the holder, which loads no torch, and without the launcher and its links, which all of the others use.
OF_TORCH := $(addprefix tests/,test_all_reduce.py test_attach.py test_backend.py test_errors.py gradients attach outer comm backend reproducible sums checkpoint lab) \
  $(addprefix --ignore=tests/,checkpoint/holder lab/testbed)

test-torches: $(TORCHES:%=test-torch-%) ## what starts ranks, on the oldest and the newest torch; TORCHES="2.12 2.13": on these

$(TORCHES:%=test-torch-%): test-torch-%: $(VENV)/torch-%/.installed
	THINWIRE_EXAMPLES=25 $(VENV)/torch-$*/bin/python tools/suite.py $(SHARED) -m "ranks and not gpu and not slow" --pairs $(OF_TORCH)

$(TORCHES:%=$(VENV)/torch-%/.installed): $(VENV)/torch-%/.installed: pyproject.toml constraints.txt
	@echo "torch $*: an environment of its own, 2 to 10 minutes; 1.3 GB on disk, or 6 GB where pip has only the build with CUDA"
	$(PYTHON) -m venv $(VENV)/torch-$*
	$(VENV)/torch-$*/bin/python tools/install_torch.py $*
	grep -v '^torch==' constraints.txt > $(VENV)/torch-$*/constraints.txt
	$(VENV)/torch-$*/bin/python -m pip install --quiet -c $(VENV)/torch-$*/constraints.txt -e '.[all,test]'
	@touch $@

test-nightly: test-all ## all of them, and long fuzzing
	THINWIRE_EXAMPLES=300 $(PYTEST) -m "not gpu and not slow and not ranks"

site: install    ## build the site into site/, failing on any warning
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: site kernels ## build the site; run its notebook and its commands, made small
	$(SUITE) -m "docs" -n $(WORKERS) --dist worksteal tests/docs

dist: install    ## build the wheel and the sdist into dist/, and check them as PyPI does
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

house:            ## measure the structure of the library: files on the way of a gradient, sizes, circles, duplicate names
	$(BIN)/python tools/house.py

format: install  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:           ## remove everything that make created
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis dist build
