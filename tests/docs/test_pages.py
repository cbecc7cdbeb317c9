"""The site is complete: every page can be reached, and the reference tables have what the source has."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from documents import DOCUMENTS, ROOT
from loops import for_each
from thinwire import errors
from thinwire.observe.step import ParameterRecord

SOURCE = ROOT / "src" / "thinwire"
DOCS = ROOT / "docs"
SOURCES = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}

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


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("figures")


def test_every_page_is_in_the_navigation(site_pages: ModuleType) -> None:
    """Those in docs/ and those that tools/site_pages.py writes; and the navigation lists nothing else."""
    listed = re.findall(r"^ +- .*?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted([*pages, *site_pages.PAGES])


def test_every_environment_variable_is_documented() -> None:
    page = set(first_column("reference/environment.md"))
    read = {name for text in SOURCES.values() if "os.environ" in text for name in _variables(text)}
    assert read - page - SET_FOR_CHILDREN == set()
    assert {name for name in page if name.startswith("THINWIRE_")} <= read, "documented, but nothing reads it"


def _variables(source: str) -> Iterator[str]:
    """Names of variables in statements that use ``os.environ``, also by a constant."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.If, ast.While)):
            node = node.test
        elif not isinstance(node, ast.stmt) or hasattr(node, "body"):
            continue
        if any("os.environ" in line for line in lines[node.lineno - 1 : node.end_lineno]):
            text = re.sub(r"((?:get|setdefault)\([^,()]+), '[^']*'\)", r"\1)", ast.unparse(node))  # without defaults
            if "os.environ" in text:
                yield from re.findall(r"'([A-Z][A-Z0-9_]{3,})'", text)
                for name in re.findall(r"\b_?[A-Z][A-Z0-9_]{3,}\b", re.sub(r"'[^']*'", "", text)):
                    yield from _constant(name)


@cache
def _constant(name: str) -> list[str]:
    """The texts that a constant of any module stands for."""
    defined = re.compile(rf"^(\w+, )*{name}\b.* = ", re.MULTILINE)
    return [
        value
        for text in SOURCES.values()
        if defined.search(text)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
        for value in _values(node, name)
    ]


def _values(node: ast.Assign, name: str) -> Iterator[str]:
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
        for path, text in SOURCES.items()
        if "lab" not in path.relative_to(SOURCE).parts and re.search(r'"[a-z]+/[a-z_]+"', text)
        for node in ast.walk(ast.parse(text))
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
        assert {name for name in site_pages.public_names(package) if f"{package}.{name}" not in page} == set()
        assert str(ROOT) not in page


REPOSITORY = "https://github.com/thinwire/thinwire/blob/main/"


def test_links_of_the_first_page_work_in_the_repository() -> None:
    """Two led to pages that exist only in the built site."""
    text = (ROOT / "docs/index.md").read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []


def test_the_first_page_is_a_figure_and_three_lines_and_sends_to_no_other_site() -> None:
    first = (ROOT / "docs/index.md").read_text().split("\n## ")[0]
    assert re.search(r"```diff\n(.*\n){3}```", first)
    (figure,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", first)
    assert (ROOT / "docs" / figure).is_file()
    assert "start/is-it-for-me.md" in first
    assert "make docs" not in first, "who reads this is on the site"


@pytest.mark.parametrize("style", ["src/thinwire/lab/report.css", "docs/stylesheets/extra.css"])
def test_what_scrolls_sideways_has_a_shadow_where_there_is_more(style: str) -> None:
    """On a phone tables lost their last column without a mark."""
    rules = re.findall(
        r"^\.(?:scroll|md-typeset__scrollwrap)\b[^{]*\{([^}]*)\}", (ROOT / style).read_text(), re.MULTILINE
    )
    assert rules[0].count("no-repeat local") == 2, "what hides a shadow scrolls with the table"
    assert rules[0].count("no-repeat scroll") == 2


def test_readme_is_short_and_its_links_work_anywhere() -> None:
    """PyPI shows README too, where a relative link leads nowhere."""
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") < 120
    links = re.findall(r"(?:\]\(|^\[[^]]+\]: )([^)\s]+)", text, flags=re.MULTILINE)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []
    ours = [link.removeprefix(REPOSITORY) for link in links if link.startswith(REPOSITORY)]
    assert [path for path in ours if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("page", ["README.md", "docs/start/demo.md"])
def test_the_rows_of_the_demo_are_those_of_its_result(page: str, figures: ModuleType) -> None:
    found = json.loads(figures.RESULT.read_text())
    assert "\n".join(figures.rows(found)) in (ROOT / page).read_text(), "python tools/figures.py prints the rows"
    assert figures.FIGURE.read_text() == figures.draw(found), "python tools/figures.py draws it"


def test_the_tables_of_trainings_are_those_of_their_results(figures: ModuleType) -> None:
    """`python tools/figures.py` prints the rows."""
    assert "\n".join(figures.workload_rows()) in (DOCS / "evidence" / "workloads.md").read_text()
    assert "\n".join(figures.loss_rows()) in (DOCS / "guides" / "compression.md").read_text()
    assert "\n".join(figures.hsdp_rows()) in (DOCS / "integrations" / "fsdp.md").read_text()
    assert "\n".join(figures.embedding_rows()) in (DOCS / "integrations" / "sentence-transformers.md").read_text()


def test_results_are_kept_short_and_each_is_named() -> None:
    """`python tools/results.py benchmarks/results/*.json` writes them so. A page may name several by a star."""
    tool = runpy.run_path(str(ROOT / "tools" / "results.py"))
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    texts = {path: path.read_text() for path in results}
    assert [path.name for path, text in texts.items() if tool["kept"](path.stem, json.loads(text)) != text] == []
    assert sum(text.count("\n") for text in texts.values()) < 3000
    users = [*DOCUMENTS, *(ROOT / "tools").glob("*.py"), *(ROOT / "tests").rglob("*.py")]
    named = {name for path in users for name in re.findall(r"[\w*-]+(?=\.json)", path.read_text())}
    assert [path.name for path in results if not any(fnmatch(path.stem, name) for name in named if name != "*")] == []


TERMS = ("owner", "lane", "union", "densification", "skewness")


@for_each(sorted(DOCS.rglob("*.md")))
def test_a_page_that_uses_our_terms_links_to_the_glossary(path: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL))
    used = {term for term in TERMS if re.search(rf"\b{term}s?\b", text, flags=re.IGNORECASE)}
    assert not used or path.name == "glossary.md" or "glossary.md" in text, used


def test_the_glossary_has_our_terms() -> None:
    defined = re.findall(r"^\*\*(.+)\*\*$", (DOCS / "start" / "glossary.md").read_text(), flags=re.MULTILINE)
    assert set(TERMS) <= set(defined)
    assert defined == sorted(defined, key=str.lower)


RESULTS = {
    "docs/evidence/checkpoint-faults.md": "the outcomes in its tables are printed by benchmarks/fault_campaign.py",
}


@for_each(DOCUMENTS)
def test_words_that_were_replaced_do_not_come_back(path: Path) -> None:
    """Words that stood for others, and what they stood for."""
    words = {
        "anew": "again",
        "told": "sent, given",
        "of fewest bytes": "smallest",
        "tables of embeddings are in no plan": "embeddings are not planned",
    }
    text = "" if str(path.relative_to(ROOT)) in RESULTS else path.read_text()
    found = {word: better for word, better in words.items() if re.search(rf"\b{word}\b", text, flags=re.IGNORECASE)}
    assert found == {}


def test_every_test_that_a_page_names_is_there() -> None:
    pages = {page: page.read_text() for page in DOCUMENTS}
    named = {name for text in pages.values() for name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text)}
    assert named
    assert [(file, name) for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []


def test_no_page_keeps_the_marks_of_a_merge() -> None:
    marks = re.compile(r"^(?:<{7} |={7}$|>{7} )", flags=re.MULTILINE)
    assert [page for page in DOCUMENTS if marks.search(page.read_text())] == []
