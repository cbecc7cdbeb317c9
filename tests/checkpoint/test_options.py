"""Paths among the options."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.checkpoint import Disk, Storage

pytestmark = pytest.mark.ranks


def test_a_relative_socket_is_where_it_was_when_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = Storage(holder_socket="h")
    monkeypatch.chdir("/")
    assert storage.holder_socket == tmp_path / "h"


def test_a_relative_directory_is_where_it_was_when_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frameworks change the working directory between two lines of a script, each start to another one."""
    monkeypatch.chdir(tmp_path)
    disk = Disk("ckpt")
    (tmp_path / "outputs").mkdir()
    monkeypatch.chdir("outputs")
    assert disk.directory == tmp_path / "ckpt"
    assert Disk(tmp_path / "ckpt") == disk
