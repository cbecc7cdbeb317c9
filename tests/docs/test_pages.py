"""The site is complete: every page can be reached, and the reference tables have what the source has."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from types import ModuleType

import pytest

from documents import ROOT
from thinwire import errors
from thinwire.observe.step import ParameterRecord

SOURCE = ROOT / "src" / "thinwire"
DOCS = ROOT / "docs"
TREES = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}

SET_FOR_CHILDREN = {"MASTER_PORT", "PYTHONPATH"}
"""Variables that thinwire only sets, for the processes that it starts."""


def first_column(page: str) -> list[str]:
    """The names in backquotes in the first column of all tables of a page."""
    rows = re.findall(r"^\| (`[^|]+) \|", (DOCS / page).read_text(), flags=re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.fixture
def site_pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    pytest.importorskip("griffe", reason="needs the extra docs: pip install -e '.[docs]'")
    return importlib.import_module("site_pages")


def test_every_page_is_in_the_navigation(site_pages: ModuleType) -> None:
    """Those in docs/ and those that tools/site_pages.py writes; and the navigation lists nothing else."""
    listed = re.findall(r"^ +- .*?([\w/-]+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = [path for suffix in ("*.md", "*.ipynb") for path in DOCS.rglob(suffix)]
    assert sorted(listed) == sorted([*(str(path.relative_to(DOCS)) for path in pages), *site_pages.PAGES])


def test_every_environment_variable_is_documented() -> None:
    page = set(first_column("reference/environment.md"))
    read = {name for tree in TREES.values() for name in _variables(tree)}
    assert read - page - SET_FOR_CHILDREN == set()
    assert {name for name in page if name.startswith("THINWIRE_")} <= read, "documented, but nothing reads it"


def _variables(tree: ast.Module) -> Iterator[str]:
    """Names of variables in statements that use ``os.environ``, also by a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and "os.environ" in ast.unparse(node):
            yield from re.findall(r"'([A-Z][A-Z0-9_]{3,})'", ast.unparse(node))
            for name in re.findall(r"\b_?[A-Z][A-Z0-9_]{3,}\b", re.sub(r"'[^']*'", "", ast.unparse(node))):
                yield from _constant(name)
        elif isinstance(node, (ast.If, ast.While)) and "os.environ" in ast.unparse(node.test):
            yield from re.findall(r"'([A-Z][A-Z0-9_]{3,})'", ast.unparse(node.test))


def _constant(name: str) -> Iterator[str]:
    """The text that a constant of any module stands for."""
    for tree in TREES.values():
        for node in tree.body:
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
                pairs = [(target, value)]
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = list(zip(target.elts, value.elts, strict=True))
                for left, right in pairs:
                    if isinstance(left, ast.Name) and left.id == name and isinstance(right, ast.Constant):
                        yield str(right.value)


def test_every_statistic_is_documented() -> None:
    """The keys of dictionaries with slash names, outside of the benchmarks, which have pages of their own."""
    keys = {
        key.value
        for path, tree in TREES.items()
        if "lab" not in path.relative_to(SOURCE).parts
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and re.fullmatch(r"[a-z]+/[a-z_]+", key.value)
    }
    documented = first_column("reference/stats.md")
    assert {name for name in documented if "/" in name} == keys
    assert [name for name in documented if "/" not in name] == list(ParameterRecord("name").row())


def test_every_error_is_documented() -> None:
    page = (DOCS / "reference" / "errors.md").read_text()
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    for error in classes:
        assert f"| `{error.__name__}` | `{error.__bases__[0].__name__}` |" in page


def test_generated_pages_are_complete(site_pages: ModuleType) -> None:
    """Every command with its options, every public name."""
    commands = site_pages.commands_page()
    for name in ("thinwire demo", "thinwire bench sync", "thinwire plan show", "thinwire holder"):
        assert f"`{name}`" in commands
    assert "--secret-file" in commands
    for package in site_pages.PACKAGES:
        page = site_pages.python_page(package)
        public = set(importlib.import_module(package).__all__) - site_pages.PUBLISHED_ELSEWHERE
        assert {name for name in public if f"{package}.{name}" not in page} == set()
