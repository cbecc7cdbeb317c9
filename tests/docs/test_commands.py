"""Every command in the documents is parsed by the program that it names, and every file that it reads is there."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import thinwire
from documents import ROOT, Block, Command, blocks, commands
from loops import for_each
from thinwire.checkpoint import Checkpointer
from thinwire.lab.cli.main import app

SHELL = list(blocks("sh", "bash", "console"))
PYTHON = list(blocks("python"))
COMMANDS = [command for block in SHELL for command in commands(block)]

READERS_OWN = {"train.py", "job.secret", "measured.json", "plan.json"}
"""Files of a reader. All others are in the repository, or an earlier command of the same page writes them."""

WRITTEN = {"--json", "--html", "--report", "--picture", "--output", "--measurement", "--record"}
"""Options whose value is a file to write."""

OTHERS = {"git", "cd", "pip", "make", "torchrun", "python", "openssl", "umask", "thinwire", "kubectl", "bash", "."}
"""Programs that the documents run. What is not `thinwire` is checked for the files and targets that it names."""


def parse(words: tuple[str, ...]) -> None:
    """Let the command line parse a call to its end without running it. Raises what it would print."""
    command: Any = typer.main.get_command(app)
    context, name, rest = None, "thinwire", list(words[1:])
    while True:
        context = command.make_context(name, list(rest), parent=context)
        if not hasattr(command, "resolve_command") or not context._protected_args + context.args:
            return
        name, command, rest = command.resolve_command(context, context._protected_args + context.args)


def thinwire_words(command: Command) -> tuple[str, ...] | None:
    """Return the part of a command that `thinwire` gets, or None: torchrun can start it too."""
    words = command.words
    if words[0] == "torchrun" and "--no-python" in words:
        words = words[words.index("--no-python") + 1 :]
    if words[:3] == ("python", "-m", "thinwire"):
        words = ("thinwire", *words[3:])
    return words if words[0] == "thinwire" else None


NAMED = (ast.ClassDef, ast.FunctionDef)

THINWIRE = [command for command in COMMANDS if thinwire_words(command)]


@for_each(THINWIRE)
def test_the_command_line_knows_the_command(command: Command) -> None:
    words = thinwire_words(command)
    assert words is not None
    if {"--help", "--version"} & set(words):
        with pytest.raises(BaseException) as end:
            parse(words)
        assert end.value.exit_code == 0  # type: ignore[attr-defined]
    else:
        parse(words)


def test_the_documents_use_the_names_of_options_that_help_shows() -> None:
    old = [f"{command}" for command in THINWIRE for word in command.words if word in ("--workers", "--html")]
    assert old == []


def test_parsing_finds_what_is_wrong() -> None:
    for words in (
        ("thinwire", "demo", "--no-such-option"),
        ("thinwire", "bench", "synch"),
        ("thinwire", "bench", "sync", "--hosts", "many"),
        ("thinwire", "plan", "show"),
    ):
        with pytest.raises(Exception, match=r"(?i)no such|missing|valid"):
            parse(words)


@for_each(SHELL)
def test_files_that_are_read_are_there(block: Block) -> None:
    """In the repository, or written by an earlier command of the page."""
    page = [command for command in COMMANDS if command.block.path == block.path and command.block.line <= block.line]
    written: set[str] = set()
    for command in page:
        missing = {name for name in _read_files(command) if name not in written | READERS_OWN}
        if command.block == block:
            assert {name for name in missing if not (ROOT / name).exists()} == set(), command
        written |= set(_written_files(command))


def _read_files(command: Command) -> Iterator[str]:
    for before, word in zip(("", *command.words), command.words, strict=False):
        if before not in WRITTEN and before != ">" and re.fullmatch(r"[\w./-]+\.(py|json|md|toml|secret|txt)", word):
            yield word


def _written_files(command: Command) -> Iterator[str]:
    for before, word in zip(("", *command.words), command.words, strict=False):
        if before in WRITTEN or before == ">":
            yield word


def test_functions_that_are_named_are_there() -> None:
    """Those named as file.py:function."""
    named = {word for command in THINWIRE for word in command.words if re.fullmatch(r"[\w/]+\.py:\w+", word)}
    assert named
    for file, _, function in (name.partition(":") for name in named):
        assert f"\ndef {function}(" in (ROOT / file).read_text()


@for_each(COMMANDS)
def test_programs_are_known(command: Command) -> None:
    program, *rest = command.words
    assert program in OTHERS, "a new program: say in OTHERS how it is checked"
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets)
    if program == "pip":
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
        named = {name for word in rest for part in re.findall(r"\[([\w,]+)\]", word) for name in part.split(",")}
        assert named <= set(extras)


SCRIPTS = [command for command in COMMANDS if command.words[0] in ("python", "torchrun")]


@for_each(SCRIPTS)
def test_scripts_know_their_options(command: Command) -> None:
    """Those behind a script of the repository."""
    script = next((word for word in command.words if (ROOT / word).is_file()), None)
    if script is not None:
        options = [word for word in command.words[command.words.index(script) :] if word.startswith("--")]
        assert [option for option in options if f'"{option}"' not in (ROOT / script).read_text()] == []


@for_each(PYTHON)
def test_python_compiles(block: Block) -> None:
    ast.parse(_dedented(block.code), str(block))


INTEGRATIONS = {
    path.stem: {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, NAMED)}
    for path in (ROOT / "src/thinwire/integrations").glob("*.py")
}
"""What each integration defines, read from its source: its framework may not be installed."""


@for_each(PYTHON)
def test_names_in_python_exist(block: Block) -> None:
    for name in re.findall(r"(?<![\w.])thinwire((?:\.\w+)+)", block.code):
        first, *rest = name[1:].split(".")
        if first == "integrations":
            assert set(rest[1:]) <= INTEGRATIONS[rest[0]]
            continue
        reached: Any = thinwire
        for part in (first, *rest):
            reached = getattr(reached, part, None) or importlib.import_module(f"{reached.__name__}.{part}")
    for name in re.findall(r"\bsync\.(\w+)", block.code):
        kinds = thinwire.Synchronizer, thinwire.outer.OuterLoop
        assert any(hasattr(kind, name) for kind in kinds) or name in set().union(*INTEGRATIONS.values())
    for name in re.findall(r"\bcheckpointer\.(\w+)", block.code):
        assert hasattr(Checkpointer, name)


def _dedented(code: str) -> str:
    indent = re.match(r" *", code)
    assert indent is not None
    return re.sub(rf"^{indent[0]}", "", code, flags=re.MULTILINE)


def test_no_command_hides_in_an_indented_block() -> None:
    """Only fenced blocks are checked, so a command must be in one; tables and sentences name commands in backquotes."""
    hidden = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted({*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"})
        for line in _outside_fences(path)
        if re.match(r" {4,}(\$ )?(thinwire|torchrun|python|make|pip) ", line)
    ]
    assert hidden == []


def _outside_fences(path: Path) -> Iterator[str]:
    is_inside = False
    for line in path.read_text().splitlines():
        is_inside ^= line.lstrip().startswith("```")
        if not is_inside:
            yield line
