"""The documents against the code: paths that they name, the way of a gradient, and measures that do not grow."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from loops import for_each
from thinwire.sums.union_shares import deal

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "thinwire"
TOOLS = ROOT / "tools"
DESIGN = ROOT / "docs" / "design.md"
NAVIGATION = (ROOT / "mkdocs.yml").read_text()
TEXTS = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "benchmarks").glob("*.py")),
    *sorted((ROOT / "examples").glob("*.py")),
]
FOREIGN = {
    "train.py",
    "file.py",
    "path/to/file.py",
    "powerSGD_hook.py",
    "thinwire.json",
    "thinwire/holder",
    "thinwire.compress.NAME",
    "SCRIPT.py",
}
"""Names that look like ours: a reader's script, a file of torch, a report, a label, and where any name can stand."""

MOST_UNDER_AUTO = 26
"""Files that a gradient may enter in an ordinary step under "auto", whichever scheme is chosen on this machine."""


def missing(text: str) -> list[str]:
    """Files, folders, modules and names that a text speaks of, and that are not there."""
    return sorted({*_missing_files(text), *_missing_folders(text), *_missing_names(text), *_missing_members(text)})


def _missing_files(text: str) -> Iterator[str]:
    """Python files that are not there: paths in the repository or in the package, or the bare name of a file."""
    text = re.sub(r"([\w/]*)\{([\w,]+)\}\.py", _spelled_out, text)
    for name in set(re.findall(r"(?<![\w./*-])[\w./-]*\w\.py\b|(?<=\*\*)[\w./-]*\w\.py\b", text)) - FOREIGN:
        there = any((folder / name).is_file() for folder in (ROOT, SOURCE.parent, SOURCE))
        if not there and ("/" in name or name not in _known_files()):
            yield name


@cache
def _known_files() -> set[str]:
    return {path.name for folder in ("src", "tests", "tools", "benchmarks", "examples") for path in _files(folder)}


def _spelled_out(braces: re.Match[str]) -> str:
    """The paths that braces stand for, one after the other."""
    return " ".join(f"{braces[1]}{name}.py" for name in braces[2].split(","))


def _files(folder: str) -> Iterator[Path]:
    return (ROOT / folder).rglob("*.py")


def _missing_folders(text: str) -> Iterator[str]:
    """Folders in backquotes or bold that are not there."""
    for name in set(re.findall(r"(?:`|\*\*)((?:[a-z_]+/)+)(?:`|\*\*)", text)):
        built = {"site/"}  # by `make docs`
        if name not in built and not any((folder / name).is_dir() for folder in (ROOT, SOURCE.parent, SOURCE)):
            yield name
    for name in set(re.findall(r"(?:src/|`)(thinwire(?:/\w+)+(?:\.\w+)?)", text)) - FOREIGN:
        if not (SOURCE.parent / name).exists():
            yield name


def _missing_names(text: str) -> Iterator[str]:
    """Modules, and what they define, by dotted names that begin with the package."""
    for name in set(re.findall(r"(?<![\w./-])thinwire(?:\.[A-Za-z_]\w*)+", text)) - FOREIGN:
        if not _is_defined(name):
            yield name


def _missing_members(text: str) -> Iterator[str]:
    """Names that are said to be in a file, as "`Class.method` in `file`", and are not."""
    for name, file in re.findall(r"`([A-Za-z_][\w.]*)`\s+in\s+`([\w/.]+\.py)`", text):
        paths = [folder / file for folder in (ROOT, SOURCE.parent, SOURCE) if (folder / file).is_file()]
        if paths and not all(re.search(rf"\b{part}\b", paths[0].read_text()) for part in name.split(".")):
            yield f"{name} in {file}"


def _is_defined(dotted: str) -> bool:
    """Whether it is a module, or its last file says the next name, or one of which that imports all names.

    Nothing is imported, as some need a GPU.
    """
    parts = dotted.split(".")[1:]
    path = SOURCE
    while parts and _is_module(path / parts[0]):
        path /= parts.pop(0)
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    texts = [source.read_text()]
    for module in re.findall(r"^from (thinwire[\w.]+) import \*$", texts[0], re.MULTILINE):
        texts.append((SOURCE.parent / f"{module.replace('.', '/')}.py").read_text())
    return not parts or any(re.search(rf"\b{parts[0]}\b", text) for text in texts)


def _is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").is_file()


@for_each(TEXTS)
def test_what_a_text_names_is_there(path: Path) -> None:
    assert missing(path.read_text()) == []


@pytest.mark.slow
def test_what_docstrings_name_is_there() -> None:
    paths = [path for folder in ("src", "tools", "tests") for path in _files(folder)]
    assert {path.name: found for path in paths if (found := missing(_docstrings(path)))} == {}


def _docstrings(path: Path) -> str:
    """Those of a file, of attributes too, as one text."""
    texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr)]
    return "\n".join(text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str))


@for_each([path for path in TEXTS if path.suffix == ".md"])
def test_links_lead_somewhere(path: Path) -> None:
    for file, heading in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", path.read_text()):
        target = path.parent / file if file else path
        assert target.is_file() or f" {_in_docs(target)}\n" in NAVIGATION, file  # or the build writes it
        if heading and target.is_file():
            assert heading in _anchors(target.read_text()), f"{file}#{heading}"


def _in_docs(path: Path) -> str:
    return os.path.relpath(path, ROOT / "docs")


def _anchors(text: str) -> set[str]:
    """Of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "text",
    [
        "`sync/patterns.py`",
        "**hooks/ddp.py**",
        "see `hooks/`",
        "src/thinwire/bench/recipes.py",
        "`reference_codes.py`",
        "thinwire.plan.link",
        "thinwire.sums.scheme.Plan",
        "`plan/{plan,link}.py`",
        "`Plan.sent_bytes` in `src/thinwire/sums/union_shares.py`",
    ],
)
def test_what_is_not_there_is_seen(text: str) -> None:
    assert missing(text)


def way() -> dict[str, set[str]]:
    """The files that the design names on the way of a gradient, by the heading under which it does."""
    text = DESIGN.read_text()
    start = text.index("## The way of a gradient")
    sections = re.split(r"^#+ (.*)$", text[start : text.index("\n## ", start + 1)], flags=re.MULTILINE)
    return {
        heading: set(re.findall(r"[a-z_/\d]+\.py", section))
        for heading, section in zip(sections[1::2], sections[2::2], strict=True)
    }


def kept() -> dict[str, int]:
    return json.loads((TOOLS / "house.json").read_text())


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The measures of the house; the ranks that they start find the module by the same path."""
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("house")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_way_of_a_gradient_is_as_drawn(house: ModuleType) -> None:
    entered = house.files_of_a_gradient("zen")
    assert set(entered) == way()["The way of a gradient"]
    assert len(entered) <= kept()["files_of_a_gradient_zen"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_way_under_auto_is_as_described(house: ModuleType) -> None:
    """Which scheme "auto" takes is a matter of the machine, and so are the files of that scheme."""
    entered = set(house.files_of_a_gradient("auto"))
    named = way()
    assert named['More under "auto"'] <= entered
    assert entered <= set.union(*named.values())
    assert len(entered - named["Steps that measure or try a scheme"]) <= kept()["files_of_a_gradient_auto"]
    assert len(entered) <= MOST_UNDER_AUTO


def test_the_picture_numbers_what_the_table_describes() -> None:
    """The same files by the same numbers, each described once."""
    section = DESIGN.read_text().split("## The way of a gradient")[1].split("\n### ")[0]
    drawing, table = section.split("```")[1:3]
    drawn = re.findall(r"(\d+) +([a-z_/\d]+\.py)", drawing)
    described = re.findall(r"^\| (\d+) \| `([a-z_/\d]+\.py)`", table, flags=re.MULTILINE)
    assert [int(number) for number, _ in described] == list(range(1, len(described) + 1))
    assert set(drawn) == set(described)
    assert len(re.findall(r"\.py", drawing)) == len(drawn)


def test_rows_of_a_union_are_dealt_as_drawn() -> None:
    section = DESIGN.read_text().split("## Shares of a union")[1].split("\n## ")[0]
    held = re.findall(r"(\d)((?: +[x.]){4})", section)
    owners = re.findall(r"(\d) +\|.*\| +to rank (\d)", section)
    assert [int(row) for row, _ in held] == list(range(len(held)))
    positions = [torch.tensor([int(row) for row, marks in held if marks.split()[rank] == "x"]) for rank in range(4)]
    dealt = {(row, rank) for rank, rows in enumerate(deal(positions, len(held))) for row in rows.tolist()}
    assert {(int(row), int(owner)) for row, owner in owners} == dealt


def test_lines_of_code_are_counted_without_prose(house: ModuleType) -> None:
    text = '"""Says\nwhat."""\n\n# Why\nx = (  # how\n    1\n)\n\ndef f():\n    """Return."""\n    return """a\nb"""\n'
    assert house.count_code(text, ast.walk(ast.parse(text))) == 3 + 1 + 2


def test_the_house_does_not_get_worse(house: ModuleType) -> None:
    """The measures that can be read from the sources. A traced step has the other two."""
    found = house.static_measures()
    limits = {name: limit for name, limit in (kept() | house.bounds()).items() if name in found}
    assert len(limits) == len(house.STRICT) - 2 + len(house.BOUNDED)
    worse = {name: (limits[name], found[name]) for name in limits if found[name] > limits[name]}
    assert worse == {}, "at most and is; CONTRIBUTING.md says what to do"
