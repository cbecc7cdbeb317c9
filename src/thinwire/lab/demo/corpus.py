"""Real text that every machine has: the source code of Python's standard library, as word ids.

A word is a run of word characters (an identifier, keyword, number, or a word of a comment) or a single
punctuation mark: the pattern ``\\w+|[^\\w\\s]``. On CPython 3.11.7 with its tests that gives 7,068,167 tokens
and 119,788 distinct words, of which 42 % occur once. No word is folded into an "unknown" one here: the long
tail is why the gradients of the embedding tables are sparse.
"""

import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinwire.lab.missing import cache_home

CACHE_VERSION = 1
"""Version of the cache: raise it when the pattern, the order of the files or the layout of the cache changes."""

WORD_PATTERN = re.compile(r"\w+|[^\w\s]")
INSTALLED_PACKAGES = frozenset({"site-packages", "dist-packages"})

Progress = Callable[[int, int], None]
"""Function called with (files done, files in all)."""


class CorruptCacheError(Exception):
    """Raised when the cached corpus is missing, incomplete or does not match its own checksum."""


@dataclass(frozen=True)
class Corpus:
    """A text as word ids.

    ``tokens`` is int32 ``[num_tokens]``, each in ``[0, len(vocabulary))``; ``vocabulary`` holds the words,
    most frequent first (ties in alphabetical order), so that a word's id is its frequency rank.
    """

    tokens: npt.NDArray[np.int32]
    vocabulary: tuple[str, ...]

    @property
    def num_words(self) -> int:
        """Number of distinct words."""
        return len(self.vocabulary)


def load(source: Path | None = None, cache: Path | None = None, progress: Progress | None = None) -> Corpus:
    """Return the corpus of ``source`` (default: the standard library), from the cache if that is sound.

    A missing or corrupt cache is rebuilt (about 4 s for 31 MB of source) and written atomically. A cache that
    cannot be written (read-only home) is not an error: the corpus is tokenized again next time.

    >>> corpus = load()
    >>> corpus.vocabulary[:3]
    ('.', '(', ')')
    """
    directory = cache_directory(source, cache)
    try:
        return read_cache(directory)
    except CorruptCacheError:
        corpus = tokenize(source_files(source or standard_library()), progress)
    try:
        write_cache(corpus, directory)
    except OSError as error:
        print(f"the corpus could not be cached in {directory}: {error}", file=sys.stderr)
    return corpus


def standard_library() -> Path:
    """Return the directory of the source of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(source: Path) -> list[Path]:
    """List every ``*.py`` below ``source`` in the order of its relative path, without installed packages."""
    relative = (path.relative_to(source) for path in source.rglob("*.py") if path.is_file())
    kept = sorted(path.as_posix() for path in relative if INSTALLED_PACKAGES.isdisjoint(path.parts))
    if not kept:
        raise ValueError(f"no Python source found below {source}; give a directory that holds *.py files")
    return [source / path for path in kept]


def tokenize(files: list[Path], progress: Progress | None = None) -> Corpus:
    """Split the files into words and number these by frequency."""
    first_seen: defaultdict[str, int] = defaultdict(count().__next__)
    pieces: list[npt.NDArray[np.int32]] = []
    for done, path in enumerate(files, start=1):
        words = WORD_PATTERN.findall(path.read_text(encoding="utf-8", errors="replace"))
        pieces.append(np.fromiter(map(first_seen.__getitem__, words), np.int32, len(words)))
        if progress is not None:
            progress(done, len(files))
    return _ranked_by_frequency(np.concatenate(pieces), list(first_seen))


def _ranked_by_frequency(tokens: npt.NDArray[np.int32], words: list[str]) -> Corpus:
    counts = np.bincount(tokens, minlength=len(words)).tolist()
    order = sorted(range(len(words)), key=lambda word: (-counts[word], words[word]))
    rank = np.empty(len(words), np.int32)
    rank[order] = np.arange(len(words), dtype=np.int32)
    return Corpus(rank[tokens], tuple(words[word] for word in order))


def cache_directory(source: Path | None = None, cache: Path | None = None) -> Path:
    """Return the directory of a Python release, cache version and source directory, below the user's cache."""
    base = cache or cache_home() / "thinwire"
    release = ".".join(map(str, sys.version_info[:3]))
    location = zlib.crc32(str((source or standard_library()).resolve()).encode())
    return base / f"corpus-v{CACHE_VERSION}-{sys.implementation.name}-{release}-{location:08x}"


def tokens_file(directory: Path) -> Path:
    """Return the file of word ids in a cache directory: int32, to be mapped by ``numpy.load(..., mmap_mode="r")``."""
    return directory / "tokens.npy"


def read_cache(directory: Path) -> Corpus:
    """Read a cached corpus. Raises :class:`CorruptCacheError` unless every byte is as it was written."""
    try:
        tokens = np.load(tokens_file(directory), mmap_mode="r", allow_pickle=False)
        text = np.load(directory / "vocabulary.npy", allow_pickle=False)
        checksums = json.loads((directory / "checksums.json").read_text())
    except (OSError, ValueError, EOFError) as error:
        raise CorruptCacheError(str(error)) from error
    if checksums != _checksums(tokens, text):
        raise CorruptCacheError(f"the checksums in {directory} do not fit its contents")
    return Corpus(tokens, tuple(text.tobytes().decode().split("\n")))


def write_cache(corpus: Corpus, directory: Path) -> None:
    """Write the corpus so that other processes see either all of it or nothing."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=directory.name, dir=directory.parent))
    try:
        # Words hold no white space, so a line feed separates them. A fixed-width string array would be 100
        # times larger: some words of the tests are thousands of characters long.
        text = np.frombuffer("\n".join(corpus.vocabulary).encode(), np.uint8)
        np.save(tokens_file(staging), corpus.tokens)
        np.save(staging / "vocabulary.npy", text)
        (staging / "checksums.json").write_text(json.dumps(_checksums(corpus.tokens, text)))
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _checksums(tokens: npt.NDArray[np.int32], text: npt.NDArray[np.uint8]) -> dict[str, int]:
    return {"tokens": zlib.crc32(tokens.data), "vocabulary": zlib.crc32(text.data)}
