"""Kernels are compiled once a machine, in the background, and nobody waits for them who trains."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clocks import PATIENCE, wait_until
from thinwire import kernels
from thinwire.kernels import dispatch, warm
from thinwire.kernels.dispatch import Once
from thinwire.kernels.jit import take_lock
from thinwire.kernels.reference import rows as reference

NAMES = ("sum_rows", "deal", "mix")
needs_jit = pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT", "0") != "0", reason="nothing is compiled")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The process that compiles does nothing and ends when the file is there, with the status that is in it."""
    end = tmp_path / "end"
    code = "import os, time\nwhile not os.path.exists(END): time.sleep(0.01)\nexit(int(open(END).read()))"
    monkeypatch.setattr(dispatch, "_COMMAND", code.replace("END", repr(str(end))))
    monkeypatch.setattr(dispatch, "LOOK_SECONDS", 0.0)
    yield end
    end.write_text("0")


def compile_kernels(once: Once, *names: str) -> None:
    Once(once.directory, names).compile_here(lambda name: True, lambda done: None)


def test_what_is_compiled_is_known_to_all(tmp_path: Path, patient: Path) -> None:
    one, other = Once(tmp_path, NAMES), Once(tmp_path, NAMES)
    assert not one.has("mix")
    assert one._child is not None
    compile_kernels(other, "mix")
    assert one.has("mix")
    assert not one.has("deal")
    assert not one.is_complete()
    compile_kernels(other, *NAMES)
    assert one.has("deal")
    assert one.is_complete()


def test_one_process_compiles(tmp_path: Path, patient: Path) -> None:
    ranks = [Once(tmp_path, NAMES) for _ in range(4)]
    for _ in range(3):
        assert not any(rank.has("mix") for rank in ranks)
    assert [rank._child is not None for rank in ranks] == [True, False, False, False]


def test_all_know_whether_one_is_at_it(tmp_path: Path, patient: Path) -> None:
    ranks = [Once(tmp_path, NAMES) for _ in range(2)]
    assert not any(rank.is_busy() for rank in ranks)
    ranks[0].start()
    assert all(rank.is_busy() for rank in ranks)
    compile_kernels(ranks[1], *NAMES)
    assert not any(rank.is_busy() for rank in ranks)


@needs_jit
def test_calls_that_compile_or_load_are_counted() -> None:
    ids = torch.arange(2000)
    call = dispatch._dispatched(reference.mix, dispatch.KERNELS["mix"])
    for mode, counted in (("reference", 0), ("numba", 1), ("numba", 0)):
        before = dispatch.unready_calls()
        with kernels.using(mode):
            call(ids, 0)
        assert dispatch.unready_calls() == before + counted


def test_another_process_takes_over_from_one_that_was_killed(
    tmp_path: Path, patient: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Once(tmp_path, NAMES), Once(tmp_path, NAMES)
    first.start()
    second.start()
    assert first._child is not None
    assert second._child is None
    first._list.write_text("deal\nmi")  # killed while it wrote
    first._child.send_signal(signal.SIGKILL)
    wait_until(lambda: second.has("mix") or second._child is not None)
    assert second._child is not None
    assert second.has("deal")
    with caplog.at_level(logging.WARNING, "thinwire"):
        wait_until(lambda: first.has("mix"))  # which now compiles it itself
    assert "at their first calls" in caplog.text
    assert not second.has("mix")
    compile_kernels(Once(tmp_path, NAMES), *NAMES)
    assert second.has("mix")
    assert second.has("sum_rows")


def test_a_process_that_fails_is_not_started_again(
    tmp_path: Path, patient: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patient.write_text("3")
    rank = Once(tmp_path, NAMES)
    with caplog.at_level(logging.WARNING, "thinwire"):
        wait_until(lambda: rank.has("mix"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ended with 3" in caplog.text
    assert rank.is_complete(), "each kernel is compiled at its first call, as where no process can be started"


@pytest.mark.parametrize("trouble", ["no interpreter", "no directory"])
def test_where_no_process_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    if trouble == "no interpreter":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    rank = Once(tmp_path if trouble == "no interpreter" else tmp_path / "gone", NAMES)
    with caplog.at_level(logging.WARNING, "thinwire"):
        assert rank.has("mix")
    assert len(caplog.records) == 1


def test_processes_that_wait_share_the_work(tmp_path: Path) -> None:
    """Each kernel is compiled by one of them, and they return when all are."""
    meet, compiled = threading.Barrier(3), []

    def compile_kernel(name: str) -> bool:
        meet.wait(PATIENCE)  # so that each has one
        compiled.append(name)
        return True

    ranks = [Once(tmp_path, NAMES) for _ in range(3)]
    threads = [threading.Thread(target=rank.compile_here, args=(compile_kernel, lambda done: None)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(compiled) == sorted(NAMES)
    assert all(rank.is_complete() for rank in ranks)


def test_a_kernel_of_a_process_that_was_killed_is_compiled_by_another(tmp_path: Path) -> None:
    rank, names = Once(tmp_path, NAMES), list[str]()
    killed = take_lock(tmp_path / "deal.lock")  # as of a process that compiles it
    assert killed is not None
    thread = threading.Thread(target=rank.compile_here, args=(lambda name: not names.append(name), names.count))
    thread.start()
    wait_until(lambda: len(names) == 2)
    assert set(names) == {"sum_rows", "mix"}
    killed.close()
    thread.join(PATIENCE)
    assert names[2:] == ["deal"]


def test_what_was_not_kept_is_not_recorded(tmp_path: Path) -> None:
    rank = Once(tmp_path, NAMES)
    rank.compile_here(lambda name: name != "deal", lambda done: None)
    assert Once(tmp_path, NAMES).compiled() == ["sum_rows", "mix"]


@needs_jit
def test_a_full_disk_stops_no_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called = list[str]()
    monkeypatch.setattr(warm, "compile_kernel", lambda name: not called.append(name))
    monkeypatch.setattr(dispatch, "compilation", lambda: Once(tmp_path / "gone", NAMES))
    with caplog.at_level(logging.WARNING, "thinwire"):
        warm._compile_or_load()
    assert len(called) == len(dispatch.compiled_kernels())
    assert "by this process alone" in caplog.text


def test_only_named_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.only(["mix", "deal"])
    try:
        assert [kernel.name for kernel in dispatch.compiled_kernels()] == ["deal", "mix"]
        once = dispatch.compilation()
        assert once is None or once.names == ("deal", "mix")
    finally:
        dispatch.only(None)
    assert len(dispatch.compiled_kernels()) > 30


def test_warming_up_does_nothing_where_the_reference_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_numba", None)
    with kernels.using("reference"):
        kernels.warm_up()
        kernels.warm_up(wait=False)


def test_uses_that_overlap_leave_nothing_behind() -> None:
    """Two threads: one begins before the other ends, and ends after it."""
    first, second = kernels.using("numba"), kernels.using("reference")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert dispatch.mode() == "reference"
    second.__exit__(None, None, None)
    assert dispatch._forced is None


COLD = """
import sys, time
import torch
from numba.core import event
from thinwire import kernels
from thinwire.kernels import dispatch
from thinwire.kernels.reference import rows as reference

dispatch._COMMAND = "import os; os.nice = lambda by: 0\\n" + dispatch._COMMAND  # or it takes minutes

class Count(event.Listener):
    compiled = 0
    def on_start(self, started):
        self.compiled += 1
    def on_end(self, ended):
        pass

count = Count()
event.register("numba:compile", count)
dense = torch.zeros(9000, 1)
dense[::7] = 1
first = kernels.nonzero_rows(dense)
compilation = dispatch.compilation()
assert not compilation.has("add_from_table"), "the last of all"
while not compilation.has("nonzero_rows"):
    time.sleep(0.01)
assert torch.equal(kernels.nonzero_rows(dense), first)
from thinwire.kernels.cpu.rows import _find_words
assert len(_find_words.signatures) == 1, "now it runs compiled"
assert count.compiled == 0, "in another process"
print("child", compilation._child.pid if compilation._child else None)
"""


@pytest.mark.slow
@needs_jit
def test_processes_that_start_with_an_empty_cache_compile_nothing(tmp_path: Path) -> None:
    """Two at once: both run in plain torch, and go on compiled when the one process in the background is so far."""
    pytest.importorskip("numba")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "THINWIRE_KERNELS": "auto"}
    command = [sys.executable, "-c", COLD]
    ranks = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [rank.communicate(timeout=110)[0] for rank in ranks]
    children = [int(line.split()[1]) for line in "".join(said).splitlines() if line != "child None"]
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(children) == 1
