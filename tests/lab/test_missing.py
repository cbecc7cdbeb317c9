"""A user without a home, as in containers: nothing is cached, nothing fails, and no folder is named ``~``."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from thinwire.checkpoint.holder.start import RunMarker, default_directory
from thinwire.lab.demo.corpus import CorruptCacheError, cache_directory, read_cache
from thinwire.lab.planning.cache import Setting, Speeds, load, save


def test_without_a_home_nothing_is_kept_and_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as of a user who is not in /etc/passwd
    monkeypatch.chdir(tmp_path)
    setting = Setting("host", "cpu", "2.13", 2, "loopback", 1)
    save(setting, Speeds())
    assert load(setting) == Speeds()
    with pytest.raises(CorruptCacheError):
        read_cache(cache_directory())
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    marker = RunMarker(default_directory() / "holder.sock", "the-run")
    assert [path.parent for path in marker.paths] == [default_directory()]
    assert not list(tmp_path.iterdir())
