"""Pages of the site that are not written by hand: command line, Python API, the notebook. A hook of mkdocs.

python tools/site_pages.py reference/commands.md      # print one of them
"""

from __future__ import annotations

import dataclasses
import html
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import griffe
import typer

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorials" / "two-ranks.ipynb"

PACKAGES = {
    "thinwire": "What `import thinwire` offers; names are loaded on first use. [Errors](errors.md) have a page.",
    "thinwire.schemes": "Exact schemes by name, and the types to define others. See [schemes](../guides/schemes.md).",
    "thinwire.compress": "Compressors. See [compression](../guides/compression.md).",
    "thinwire.fuse": "Fusion policies: which gradients travel together. See [fusion](../guides/fusion.md).",
    "thinwire.plan": "Plans, measurements and the timeline that judges them. See [plans](../guides/plans.md).",
    "thinwire.reproducible": "The same bits on any number of ranks. See [the guide](../guides/reproducible.md).",
    "thinwire.outer": "Outer loops: local SGD, DiLoCo, ShadowSync. See [outer loops](../guides/outer.md).",
    "thinwire.deltas": "Differences of state dicts. See [deltas](../guides/deltas.md).",
    "thinwire.backend": "Settings and statistics of the back end. See [one word](../start/one-word.md).",
    "thinwire.checkpoint": "Checkpoints in the memory of peers. See [checkpoints](../guides/checkpoints.md).",
}


def public_names(package: str) -> list[str]:
    """Return the names in ``__all__`` that are no modules: constructors first, then other classes, then exceptions."""
    module = importlib.import_module(package)
    names = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    return sorted(names, key=lambda name: (_is_exception(getattr(module, name)), not name.islower()))


def _is_exception(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def python_page(package: str) -> str:
    """Return the page of a public package: constants as a table, then each of its other names."""
    module = importlib.import_module(package)
    names = public_names(package)
    constants = [name for name in names if _is_constant(getattr(module, name))]
    lines = [f"# `{package}`", "", PACKAGES[package], ""]
    if constants:
        lines += ["| constant | value |", "|---|---|"]
        lines += [f"| `{package}.{name}` | {_value(getattr(module, name))} |" for name in constants]
        lines.append("")
    for name in names:
        if name in constants:
            continue
        if package == "thinwire" and (home := _other_home(name)):
            lines += [f"## `thinwire.{name}`", "", f"The same as [`{home}.{name}`][{home}.{name}].", ""]
        else:
            lines += [_directive(package, name, getattr(module, name)), ""]
    return "\n".join(lines)


def _other_home(name: str) -> str | None:
    """Return the other public package that has a name of `thinwire` too."""
    return next((other for other in list(PACKAGES)[1:] if name in importlib.import_module(other).__all__), None)


def _is_constant(value: object) -> bool:
    return not (inspect.isclass(value) or inspect.isroutine(value) or _is_alias(value))


def _is_alias(value: object) -> bool:
    """Return whether it is a type alias, such as ``tuple[int, ...]``."""
    return hasattr(value, "__origin__")


def _value(value: Any) -> str:
    """Return a constant in words: of a scheme what is not usual, of a dictionary its keys."""
    if isinstance(value, dict):
        return "a dictionary: " + ", ".join(f"`{key}`" for key in value)
    if not dataclasses.is_dataclass(value):
        return f"`{value!r}`"
    found = [(field.name, getattr(value, field.name), field.default) for field in dataclasses.fields(value)]
    return ", ".join(f"{name} `{_short(item)}`" for name, item, usual in found if item != usual and item is not None)


def _short(item: Any) -> str:
    names = item if isinstance(item, tuple) else (item,)
    return "/".join(str(getattr(name, "value", name)) for name in names)


def _directive(package: str, name: str, value: Any) -> str:
    """Return what mkdocstrings makes the documentation of a name from, under its public name."""
    if _is_alias(value):
        return f"## `{package}.{name}`\n\nA type: `{value}`."
    home = f"{value.__module__}.{value.__qualname__}"
    return f"::: {home}\n    options:\n      heading: {package}.{name}\n      toc_label: {name}"


def commands_page() -> str:
    """Return the reference of all commands, from the application itself."""
    from thinwire.lab.cli.main import app

    lines = ["# Command line", "", "Every command and option of this version, written by the commands themselves.", ""]
    root: Any = typer.main.get_command(app)
    for path, command, context in _walk(root, "thinwire", None):
        lines += _command(path, command, context)
    return "\n".join(lines)


def _walk(command: Any, path: str, parent: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield each command with its full name and context, groups before what they contain."""
    context = command.context_class(command, info_name=path.rpartition(" ")[2], parent=parent)
    yield path, command, context
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        _, found, _ = command.resolve_command(context, [name])
        yield from _walk(found, f"{path} {name}", context)


def _command(path: str, command: Any, context: Any) -> list[str]:
    heading = "##" if path.count(" ") < 2 else "###"
    lines = [f"{heading} `{path}`", "", *_prose(command.help), ""]
    lines += ["```text", f"{path} {' '.join(command.collect_usage_pieces(context))}", "```", ""]
    records = [record for param in command.params if (record := param.get_help_record(context))]
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    records += [(param.metavar or param.name, param.help) for param in arguments if not param.get_help_record(context)]
    if records:
        lines += ["| option | what it is |", "|---|---|"]
        lines += [f"| `{_cell(option)}` | {_cell(html.escape(text or ''))} |" for option, text in records]
        lines.append("")
    return [*lines, *_prose(command.epilog), ""]


def _prose(text: str | None) -> list[str]:
    """Return a help text as Markdown: paragraphs as they are, command lines as code."""
    lines = (line.strip() for line in inspect.cleandoc(text or "").replace("\b", "").splitlines())
    commands = r"^(|[A-Z][\w ]*: )((?:thinwire|torchrun|python) .*)$"
    return [re.sub(commands, r"\1`\2`", line) for line in lines]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def notebook_page() -> str:
    """Return the notebook with its saved outputs."""
    lines = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        text = "".join(cell["source"])
        lines += [text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```", ""]
        for output in cell.get("outputs", []):
            lines += [f"```text\n{''.join(output['text']).rstrip()}\n```", ""]
    lines[1:1] = [f"[Download it]({NOTEBOOK.name}), or read it here with its outputs.", ""]
    return "\n".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "reference/commands.md": commands_page,
    "tutorials/notebook.md": notebook_page,
    **{
        f"reference/python-{package.rpartition('.')[2]}.md": lambda package=package: python_page(package)
        for package in PACKAGES
    },
}
"""Every generated page, by its path in the site."""


class Docstrings(griffe.Extension):
    """What mkdocstrings has to know of our docstrings: "Example:" is a section, and examples are code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        if mod.path == "thinwire.kernels":
            mod.exports = None  # they follow from a registry, which is not in the text


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those of docs/; mkdocs calls it."""
    from mkdocs.structure.files import File

    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    return files


if __name__ == "__main__":
    print(PAGES[sys.argv[1]]())
