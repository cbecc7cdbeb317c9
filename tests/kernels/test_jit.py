"""Machine code on disk is that of today's sources and of the types it is called with, whoever else compiles."""

from __future__ import annotations

import ast
import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import thinwire
from thinwire.kernels import jit
from thinwire.kernels.jit import MachineCode, hash_sources, remove_old, take_lock

numba = pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(numba.config.DISABLE_JIT, reason="nothing is compiled")
KERNELS = Path(jit.__file__).parent
COMPILED = ("cpu", "reference")


def sources() -> list[Path]:
    """The files of which functions or constants are compiled into machine code."""
    return [KERNELS / "jit.py", *(path for part in COMPILED for path in (KERNELS / part).glob("*.py"))]


def test_an_edit_of_any_source_is_another_directory(tmp_path: Path) -> None:
    copy = shutil.copytree(KERNELS, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    hashes = {hash_sources(copy)}
    assert hashes == {jit.SOURCES}
    for count, path in enumerate(sources(), start=2):
        edited = copy / path.relative_to(KERNELS)
        before = edited.stat()
        text = edited.read_text()
        edited.write_text(text[:-2] + ("#" if text[-2] != "#" else "-") + "\n")
        os.utime(edited, ns=(before.st_atime_ns, before.st_mtime_ns))  # as in an image with fixed times
        hashes.add(hash_sources(copy))
        assert len(hashes) == count, path


@pytest.mark.parametrize("path", sources(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_is_compiled_in_that_is_not_hashed(path: Path) -> None:
    """A constant of another module would be frozen in machine code that outlives it."""
    imported = [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    ours = {name for name in imported if name.startswith("thinwire")}
    allowed = ("thinwire.kernels.cpu", "thinwire.kernels.reference", "thinwire.kernels.jit")
    assert all(name.startswith(allowed) for name in ours), ours


def test_settings_of_the_compiler_are_another_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = jit._hash_target()
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", 1)
    assert jit._hash_target() != before


def twice(number: Any) -> Any:
    return number + number


def process(directory: Path) -> Callable[..., Any]:
    """The function as a process has it that has just started."""
    compiled = numba.njit(twice)
    compiled._cache = MachineCode("cpu.test.twice", directory)
    return compiled


def test_processes_that_compile_for_different_types_keep_both(tmp_path: Path) -> None:
    """numba's index, read by both before either wrote, kept the code of one under the types of the other."""
    one, other, later = process(tmp_path), process(tmp_path), process(tmp_path)
    assert (one(3), other(0.5)) == (6, 1.0)
    assert (later(3), later(0.5)) == (6, 1.0)
    assert len(later.signatures) == sum(later.stats.cache_hits.values()) == 2
    assert not later.stats.cache_misses


def test_a_file_that_is_broken_or_of_other_types_is_compiled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert process(tmp_path)(3) == 6
    (integers,) = tmp_path.glob("*.code")
    assert process(tmp_path)(0.5) == 1.0
    (floats,) = set(tmp_path.glob("*.code")) - {integers}
    good = integers.read_bytes()
    for bad in (b"", good[: len(good) // 2], floats.read_bytes()):
        integers.write_bytes(bad)
        again = process(tmp_path)
        assert again(3) == 6
        assert sum(again.stats.cache_misses.values()) == 1
        assert integers.read_bytes() != bad


def test_old_machine_code_is_not_run_by_sources_that_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules of kernels are imported at their first call, when the package may have been updated in place."""
    assert process(tmp_path)(21) == 42
    monkeypatch.setattr(jit, "SOURCES", "those at the start")
    monkeypatch.setattr(jit, "_is_current", jit._is_current.__wrapped__)
    later = process(tmp_path)
    assert later(21) == 42
    assert not later.stats.cache_hits


@pytest.mark.parametrize("trouble", ["full disk", "sources changed"])
def test_what_cannot_be_kept_is_still_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if trouble == "full disk":
        monkeypatch.setattr(jit.os, "replace", refuse)
    else:
        monkeypatch.setattr(jit, "SOURCES", "those at the start")
    jit._log_uncached.cache_clear()
    lost = MachineCode.lost
    with caplog.at_level(logging.INFO, "thinwire"):
        assert process(tmp_path)(3) == 6
    assert MachineCode.lost == lost + 1
    assert not list(tmp_path.glob("*.code"))
    assert ("No space left" if trouble == "full disk" else "have changed") in caplog.text


def test_the_code_of_old_sources_is_removed_unless_a_process_uses_it(tmp_path: Path) -> None:
    target = "0" * 16
    mine, other_processor = tmp_path / f"{jit.SOURCES}-{target}", tmp_path / f"{jit.SOURCES}-{'1' * 16}"
    old, used, foreign = tmp_path / f"{'a' * 16}-{target}", tmp_path / f"{'b' * 16}-{target}", tmp_path / "a-b"
    recent = tmp_path / f"{'c' * 16}-{target}"  # of another installation
    for directory in (mine, other_processor, old, used, foreign, recent):
        directory.mkdir()
        (directory / "code").touch()
        (directory / "in-use").touch()
        if directory != recent:
            os.utime(directory / "in-use", (0, 0))
    lock = take_lock(used / "in-use", exclusive=False)
    assert lock is not None
    with lock:
        remove_old(mine)
    assert {path.name for path in tmp_path.iterdir()} == {
        d.name for d in (mine, other_processor, used, foreign, recent)
    }


@pytest.mark.parametrize("kept_in", ["user", "package", "package, without a home", "nothing"])
def test_where_machine_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_in: str) -> None:
    package, user = tmp_path / "package", tmp_path / "user"
    package.mkdir()
    if kept_in == "nothing":
        (package / "__pycache__").touch()  # a file in place of a directory: also root cannot write there
    if kept_in in ("package", "nothing"):
        user.touch()
    monkeypatch.setattr(jit, "__file__", str(package / "jit.py"))
    if "without a home" in kept_in:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(jit.os.path, "expanduser", lambda path: path)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(user))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(jit, "_in_use", [])
    jit.code_directory.cache_clear()
    try:
        directory = jit.code_directory()
    finally:
        jit.code_directory.cache_clear()
    if kept_in == "nothing":
        assert directory is None
    else:
        assert directory is not None
        assert (tmp_path / kept_in.partition(",")[0]) in directory.parents
        (lock,) = jit._in_use
        os.close(lock)


ROWS = """
import torch
from thinwire.kernels.cpu import rows
print(rows.nonzero_rows(torch.tensor([0, 1, 0, 2, 3]).view(-1, 1)).tolist())
"""


@pytest.mark.slow
def test_an_update_in_place_runs_the_new_code(tmp_path: Path) -> None:
    """The helper is in another file than the kernel that it is compiled into, which numba does not look at."""
    package = Path(thinwire.__file__).parent
    copy = shutil.copytree(package, tmp_path / "thinwire", ignore=shutil.ignore_patterns("__pycache__", "lab"))
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "THINWIRE_KERNELS": "numba",
    }

    def answer() -> str:
        ran = subprocess.run([sys.executable, "-c", ROWS], env=environment, capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    assert answer() == "[1, 3, 4]"
    bits = copy / "kernels" / "cpu" / "bits.py"
    line = "positions[count + step] = base + popcount"
    text = bits.read_text()
    assert line in text
    bits.write_text(text.replace(line, line.replace("base", "100 + base")))
    assert answer() == "[101, 103, 104]"
    bits.write_text(text)
    assert answer() == "[1, 3, 4]"
