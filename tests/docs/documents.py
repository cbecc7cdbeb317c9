"""The documents as data: fenced blocks with their marks, and where they stand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*?) -->\n+)?^ *```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its code, and the comment ``<!-- mark -->`` before it."""

    path: Path
    line: int
    language: str
    code: str
    mark: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command of a shell block: the words of its line, and the ``name=value`` assignments before them."""

    block: Block
    words: tuple[str, ...]
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.block}: {shlex.join(self.words)}"


def blocks(*languages: str) -> Iterator[Block]:
    """Yield the fenced blocks of all documents in one of these languages."""
    for path in DOCUMENTS:
        text = path.read_text()
        for found in _FENCE.finditer(text):
            if found["language"] in languages:
                line = text.count("\n", 0, found.start("code"))
                yield Block(path, line, found["language"], found["code"], found["mark"] or "")


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a shell block, line by line; a comment ends a line, a backslash continues it."""
    for line in block.code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();&|>")
        lexer.wordchars += ":{}[]@%+,<"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word not in ("&&", ";", "(", ")", "|", "&"):
                words.append(word)
                continue
            variables = []
            while words and (words[0] in ("export", "$") or re.match(r"[A-Z_]+=", words[0])):
                variables.append(words.pop(0))
            if words:
                yield Command(block, tuple(words), tuple(variable for variable in variables if "=" in variable))
            words = []
