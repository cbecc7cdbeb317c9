"""Measurements kept for their setting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from measured import codec, link
from thinwire.lab.planning import cache
from thinwire.lab.planning.cache import Setting, Speeds


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Setting.here(torch.device("cpu"), 8, "a link")


def test_what_was_measured_is_kept_for_its_setting(cached: Setting, tmp_path: Path) -> None:
    assert cache.load(cached) == Speeds()
    first = Speeds().having([codec("bf16", "all_reduce")], link(100))
    cache.save(cached, first)
    assert cache.load(cached) == first
    newer = first.having([codec("bf16", "all_reduce", alpha=2.0), codec("int8", "all_gather")], link(50))
    assert [entry.compressor for entry in newer.codecs] == ["bf16", "int8"]
    assert newer.codec("bf16", "all_reduce") == codec("bf16", "all_reduce", alpha=2.0)
    assert newer.codec("bf16", "all_gather") is None
    for change in ({"world_size": 4}, {"link": "another"}, {"host": "b"}, {"device": "H200"}, {"torch": "3"}):
        assert cache.load(replace(cached, **change)) == Speeds()
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "thinwire"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 9}', '{"version": 3, "link": {}, "codecs": []}'])
def test_a_damaged_cache_is_empty(cached: Setting, text: str) -> None:
    cached.path().parent.mkdir()
    cached.path().write_text(text)
    assert cache.load(cached) == Speeds()


def test_a_place_that_cannot_be_written_is_no_error(cached: Setting, tmp_path: Path) -> None:
    (tmp_path / "thinwire").write_text("a file in the way")
    cache.save(cached, Speeds(link(100)))
    assert cache.load(cached) == Speeds()
