"""The corpus: nothing of the text is lost, ids are frequency ranks, a damaged cache is rebuilt."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from thinwire.lab.demo import corpus

TEXTS = {"b.py": "import os\nx = 1  # naïve\n", "a.py": "x == 'x.y'\n", "sub/c.py": "def x(): pass\n"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for name, text in {**TEXTS, "site-packages/d.py": "installed = 1\n", "e.txt": "no source\n"}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def words_of(text: corpus.Corpus) -> list[str]:
    return [text.vocabulary[token] for token in text.tokens]


def test_tokens_spell_the_source_in_order_of_the_paths(source: Path, tmp_path: Path) -> None:
    text = corpus.load(source, tmp_path / "cache")
    expected = "".join(TEXTS[name] for name in sorted(TEXTS))
    assert "".join(words_of(text)) == re.sub(r"\s+", "", expected)
    assert text.tokens.dtype == np.int32


def test_ids_are_frequency_ranks_with_ties_in_alphabetical_order(source: Path, tmp_path: Path) -> None:
    text = corpus.load(source, tmp_path / "cache")
    counts = np.bincount(text.tokens, minlength=text.num_words).tolist()
    order = [(-count, word) for count, word in zip(counts, text.vocabulary, strict=True)]
    assert order == sorted(order)
    assert min(counts) >= 1
    assert text.vocabulary[0] == "x"


def test_cache_is_read_without_tokenizing(source: Path, tmp_path: Path) -> None:
    first = corpus.load(source, tmp_path / "cache")
    calls: list[tuple[int, int]] = []
    again = corpus.load(source, tmp_path / "cache", progress=lambda *counts: calls.append(counts))
    assert words_of(again) == words_of(first)
    assert calls == []


def test_progress_ends_with_all_files(source: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    corpus.load(source, tmp_path / "cache", progress=lambda *counts: calls.append(counts))
    assert calls == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("name", ["tokens.npy", "vocabulary.npy", "checksums.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_damaged_cache_is_rebuilt(source: Path, tmp_path: Path, name: str, damage: str) -> None:
    first = corpus.load(source, tmp_path / "cache")
    directory = corpus.cache_directory(source, tmp_path / "cache")
    path = directory / name
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
        path.write_bytes({"flip": flipped, "truncate": content[:-2], "empty": b""}[damage])
    with pytest.raises(corpus.CorruptCacheError):
        corpus.read_cache(directory)
    assert words_of(corpus.load(source, tmp_path / "cache")) == words_of(first)
    assert words_of(corpus.read_cache(directory)) == words_of(first)


def test_cache_is_written_whole_or_not_at_all(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dumps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        corpus.load(source, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_that_cannot_be_written_is_no_error(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file where the cache should be")
    assert corpus.load(source, tmp_path / "cache").num_words > 0
    assert "could not be cached" in capsys.readouterr().err


def test_user_cache_directory_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert corpus.cache_directory().parent == tmp_path / "thinwire"


def test_source_without_python_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Python source found"):
        corpus.load(tmp_path, tmp_path / "cache")
