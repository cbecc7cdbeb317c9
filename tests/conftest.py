"""What every test starts from: the same seeds, one thread, hypothesis without deadlines or luck.

torch and thinwire are imported by what needs them: the process that starts the workers does not, and they wait for it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import platform
import random
from collections.abc import Iterator
from importlib.metadata import version

import pytest
from hypothesis import settings

pytest_plugins = [f"tests.common.plugins.{name}" for name in ("durations", "failures", "last_words", "selection")]
os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # what tests start says where it crashed: ranks, holders, commands
# Tables travel as rows from the first step on, and not only once that is known to pay; but where a test says otherwise.
os.environ.setdefault("THINWIRE_ROUTE", "rows")
os.environ.setdefault("THINWIRE_RUN_DELAY", "0")  # no decision depends on how busy this machine is

# Nightly there are more of them: see the Makefile.
EXAMPLES = int(os.environ.get("THINWIRE_EXAMPLES", "100"))
settings.register_profile(
    "thinwire", max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, print_blob=True
)
settings.load_profile("thinwire")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected is no garbage: to look for some takes each worker 5 s of 24."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def loggers_propagate() -> None:
    """pytest adds two handlers to each logger that does not, six times a test, and torch has 43 of them."""
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True, scope="session")
def kernels_are_compiled() -> None:
    """No test should wait for them, nor send floats uncoded meanwhile. `make test` has compiled them before."""
    from thinwire import kernels

    kernels.warm_up()


@pytest.fixture(autouse=True, scope="session")
def ranks_start_with_what_attach_needs() -> None:
    """Each rank would spend 1.1 s of its processor on the first, 0.14 s on the next two, which its test imports, and
    0.25 s on the others: start and end take 0.05 s with them, and took 0.19 s. (Of Python 3.11 the server finds only
    what is installed, and passes over the others in silence.)
    """
    from thinwire.lab.testbed import launch

    for module in ("torch._dynamo", "pytest", "hypothesis", "thinwire.outer.loop", "thinwire.checkpoint.checkpointer"):
        launch.preload(module)


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
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a stack for each kind of device: 1 ms a test


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 300 words of falling frequency, each second one from the one before, every fourth of a subject."""
    import numpy as np

    from thinwire.lab.demo import corpus

    generator = np.random.default_rng(0)
    tokens = (generator.random(60_000) ** 3 * 300).astype(np.int32)
    tokens[1::2] = (tokens[::2] * 7 + 1) % 300
    tokens[::4] = generator.integers(0, 300, 60_000 // 80).repeat(20)
    text = corpus.Corpus(tokens, tuple(map(str, range(300))))
    monkeypatch.setattr(corpus, "load", lambda: text)


@pytest.fixture(scope="module")
def nothing_compiles_after_warm_up() -> Iterator[None]:
    """Whatever kernels are called with, `warm_up` has compiled for it."""
    from thinwire import kernels

    kernels.warm_up()
    before = _signatures()
    yield
    assert {name: added for name, found in _signatures().items() if (added := found - before[name])} == {}


def _signatures() -> dict[str, set[object]]:
    """The types that each function was compiled for, in this process or one before."""
    from compiled import compiled_functions

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


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
