"""What every test starts from: the same seeds, one thread, hypothesis without deadlines or luck."""

from __future__ import annotations

import ctypes
import os
import platform
import random
from collections.abc import Iterator
from importlib.metadata import version

import numpy as np
import pytest
import torch
from hypothesis import settings

from compiled import compiled_functions
from thinwire import kernels
from thinwire.lab.demo import corpus
from thinwire.lab.testbed import launch

pytest_plugins = ["last_words"]
os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # what tests start says where it crashed: ranks, holders, commands

# Nightly there are more of them: see the Makefile.
EXAMPLES = int(os.environ.get("THINWIRE_EXAMPLES", "100"))
settings.register_profile(
    "thinwire", max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, print_blob=True
)
settings.load_profile("thinwire")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def kernels_compile_one_after_the_other(request: pytest.FixtureRequest) -> None:
    """One worker compiles them, and the others wait. Of two processes that compile one function for different types at
    the same time, numba's cache (0.68) may keep the code of one under the types of the other: it writes the index
    before the code. Called with float64, such code took the bits for integers.
    """
    if hasattr(request.config, "workerinput"):
        kernels.warm_up()


@pytest.fixture(autouse=True, scope="session")
def ranks_start_with_what_attach_needs() -> None:
    """Each rank would spend 1.1 s of its processor on the first, and 0.25 s on the second."""
    launch.preload("torch._dynamo")
    launch.preload("thinwire.outer.loop")
    launch.preload("checkpoint_faults.training")


@pytest.fixture(autouse=True, scope="module")
def freed_memory_goes_back() -> Iterator[None]:
    """glibc keeps most of what was freed: a worker of `make test` ended with 1.3 GB, and both with their ranks and
    holders took 4. Of what 882 tests added to a process, 84 MB stay in place of 179.
    """
    yield
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 300 words of falling frequency, each second one from the one before, every fourth of a subject."""
    generator = np.random.default_rng(0)
    tokens = (generator.random(60_000) ** 3 * 300).astype(np.int32)
    tokens[1::2] = (tokens[::2] * 7 + 1) % 300
    tokens[::4] = generator.integers(0, 300, 60_000 // 80).repeat(20)
    text = corpus.Corpus(tokens, tuple(map(str, range(300))))
    monkeypatch.setattr(corpus, "load", lambda: text)


@pytest.fixture(scope="module")
def nothing_compiles_after_warm_up() -> Iterator[None]:
    """Whatever kernels are called with, `warm_up` has compiled for it."""
    kernels.warm_up()
    before = _signatures()
    yield
    assert {name: added for name, found in _signatures().items() if (added := found - before[name])} == {}


def _signatures() -> dict[str, set[object]]:
    """The types that each function was compiled for, in this process or one before."""
    return {name: set(function.signatures) for name, function in compiled_functions().items()}


def pytest_report_header() -> str:
    return _versions()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A report of a failure says with what it failed, also under ``-q``, which has no header."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(_versions())


def _versions() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "hypothesis"))
    return f"python {platform.python_version()}, {packages}, {platform.platform()}"
