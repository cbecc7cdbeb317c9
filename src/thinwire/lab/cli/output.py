"""What all commands print: tables, progress, JSON to a file or standard output, errors without a traceback."""

import json
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import typer
from rich import box
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from thinwire.errors import ThinwireError
from thinwire.lab.missing import missing_package, naming
from thinwire.lab.sources import parsed, spec_of

STDOUT = Path("-")
PIPE_COLUMNS = 160
"""Width of a pipe or a file, where nothing has to fit a window: no cell of a table is cut."""
LONGEST_HEAD = 7
"""Widest head of a column in one line, if it has several words."""
SECONDS_BETWEEN_LINES = 10.0
"""How often progress is reported where there is no terminal to show a bar on."""
PICTURES = (".png", ".svg", ".pdf")
_MARKS = {
    b"<!doctype html>": b'<footer aria-label="How this was made">',
    **dict.fromkeys((b"<?xml", b"%PDF", b"\x89PNG"), b"thinwire: "),
    b"PK": b"num_rows.npy",
}
"""How files begin that commands write, but for JSON, and what is in each: pages, pictures with their title, traces."""
FAILURE, USAGE, INTERRUPTED = 1, 2, 130
"""Exit statuses; success is 0, and an interrupt is Ctrl-C."""
WRONG_USAGE = (ValueError, FileNotFoundError, ModuleNotFoundError)
"""Errors that the user can correct in the command itself."""
is_command = False
"""Whether this process is the command, and not one that calls it."""


def open_console(paths: dict[str, Path | None]) -> Console:
    """Return the console for the result: standard output, or standard error when that carries the JSON.

    Before any measurement it is checked that the files named by options can be written, and that plots can be drawn.

    Args:
        paths: the files by the names of their options.

    Raises:
        typer.BadParameter: a path that cannot be written, or an image of an unknown format.
        typer.Exit: the package that draws is missing; the reason is printed.
    """
    _check_directories(paths)
    console = Console(stderr=paths.get("--json") == STDOUT, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_COLUMNS
    return console


class OnProgress(Protocol):
    """Report of how far the work is; what is left out stays as it was."""

    def __call__(self, description: str | None = None, done: int | None = None, total: int | None = None) -> None: ...


@contextmanager
def progress(description: str, total: int | None = None, quiet: bool = False) -> Iterator[OnProgress]:
    """Show work on standard error: a bar on a terminal, elsewhere a line for each stage and every ten seconds."""
    console = Console(stderr=True, quiet=quiet, emoji=False)
    if not console.is_terminal:
        with _lines(console, description, total) as on_progress:
            yield on_progress
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)

        def on_progress(description: str | None = None, done: int | None = None, total: int | None = None) -> None:
            bar.update(task, description=description, completed=done, total=total)

        yield on_progress


@contextmanager
def _lines(console: Console, description: str, total: int | None) -> Iterator[OnProgress]:
    """Print a line every ten seconds, from a thread of its own: a step or a stage may last for minutes."""
    now = {"description": description, "done": 0, "total": total}
    started, ended = time.monotonic(), threading.Event()

    def show() -> None:
        count = f": {now['done']} of {now['total']}" if now["total"] else " ..."
        elapsed = f" ({seconds:.0f} s)" if (seconds := time.monotonic() - started) >= 1 else ""
        console.print(f"{now['description']}{count}{elapsed}", markup=False, highlight=False, soft_wrap=True)

    def repeat() -> None:
        while not ended.wait(SECONDS_BETWEEN_LINES):
            show()

    def on_progress(description: str | None = None, done: int | None = None, total: int | None = None) -> None:
        given = {"description": description, "done": done, "total": total}
        is_new_stage = description not in (None, now["description"])
        now.update({name: value for name, value in given.items() if value is not None})
        if is_new_stage and not now["total"]:
            show()

    show()
    printer = threading.Thread(target=repeat, name="thinwire-progress", daemon=True)
    printer.start()
    try:
        yield on_progress
    finally:
        ended.set()
        printer.join()


def plain_table(title: str | None = None, caption: str | None = None, title_justify: JustifyMethod = "left") -> Table:
    """Return a table without columns yet: one line under the head, and no padding at the edges."""
    return Table(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify=title_justify,
        caption_justify="left",
    )


def add_column(table: Table, name: str, is_text: bool = False, folds: bool = False) -> None:
    """Add a column of figures, which are never cut, or of texts, which are folded where the window is narrow.

    Figures with ``folds`` are long ones of several words. A wide head of several words takes a line for each.
    """
    head = name.replace(" ", "\n") if len(name) > LONGEST_HEAD and not is_text else name
    justify: JustifyMethod = "left" if is_text else "right"
    table.add_column(head, justify=justify, no_wrap=not (is_text or folds), overflow="fold", min_width=6)


def print_table(console: Console, table: Table) -> None:
    """Print a table with all figures whole: in a narrow window without padding, and if need be beyond its edge."""
    least = 0
    for column in table.columns:
        if column.no_wrap:
            cells = [Text.from_markup(str(cell)).plain for cell in (column.header, *column.cells)]
            column.min_width = max(len(line) for cell in cells for line in cell.splitlines() or [""])
        least += column.min_width or 1
    gaps = len(table.columns) - 1
    if least + 2 * gaps + 2 > console.width:
        table.padding, table.show_edge = (0, 0, 0, 0), False
    console.print(table, width=max(console.width, least + gaps), crop=False)


def show_table(
    console: Console,
    columns: Iterable[str],
    rows: Iterable[Sequence[str]],
    title: str = "",
    caption: str = "",
    texts: Collection[str] = (),
    folds: Collection[str] = (),
    centered: bool = False,
) -> None:
    """Print a table of cells without markup.

    Args:
        texts: columns of texts; the others have figures, see `add_column`.
        folds: columns of long figures.
        centered: whether the title is above the middle.
    """
    table = plain_table(escape(title) or None, escape(caption) or None, "center" if centered else "left")
    for name in columns:
        add_column(table, name, is_text=name in texts, folds=name in folds)
    for row in rows:
        table.add_row(*map(escape, row))
    print_table(console, table)


def say(console: Console, *lines: str, end: str = "\n") -> None:
    """Print lines as they are: without markup, colours or cuts."""
    for line in lines:
        console.print(line, end=end, highlight=False, markup=False, soft_wrap=True)


def write_json(result: dict[str, Any], path: Path | None) -> None:
    """Write a result to a file, to standard output for ``-``, or nowhere for None."""
    if path is None:
        return
    mark = {} if result.keys() & {"environment", "fingerprint"} else {"written_by": "thinwire"}
    text = json.dumps({**mark, **result}, indent=2) + "\n"
    if path == STDOUT:
        typer.echo(text, nl=False)
    else:
        with naming(path):
            path.write_text(text)


@contextmanager
def clear_errors(*expected: type[Exception]) -> Iterator[None]:
    """Turn expected errors, thinwire's own, and those of the system, as of a full disk, into one line and a status.

    The status is 2 for wrong usage and 1 for the rest. A reader that has gone is left to `main.command`.

    A command that lacks the right to make emulated hosts restarts where it has it, before it reports an error.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (*expected, OSError, ThinwireError) as error:
        if is_command and type(error).__name__ == "NetAdminError":
            from thinwire.lab.testbed.network import restart_as_root_of_a_user_namespace

            restart_as_root_of_a_user_namespace()
        message = f"[bold red]error:[/] {escape(str(error))}"
        Console(stderr=True, emoji=False).print(message, highlight=False, soft_wrap=True)
        raise typer.Exit(USAGE if isinstance(error, WRONG_USAGE) else FAILURE) from error
    except KeyboardInterrupt as error:
        Console(stderr=True).print("interrupted")
        raise typer.Exit(INTERRUPTED) from error


def _check_directories(paths: dict[str, Path | None]) -> None:
    for option, path in paths.items():
        if path is None or (path == STDOUT and option == "--json"):
            continue
        reason = _why_not(path, option)
        if reason is not None:
            raise typer.BadParameter(reason, param_hint=option)
        if option in ("--picture", "--report") and find_spec("matplotlib") is None:
            missing = missing_package("matplotlib", option)
            if option == "--picture":
                with clear_errors():
                    raise missing
            typer.echo(f"The report will have no plots: {missing}", err=True)


def _is_ours(path: Path) -> bool:
    """Whether a file is empty or, as far as its content shows, was written by a command of thinwire."""
    content = path.read_bytes()
    if not content.startswith(b"{"):
        return not content or any(content.startswith(begin) and mark in content for begin, mark in _MARKS.items())
    try:
        data = json.loads(content)
    except ValueError:
        return False
    environment = data.get("environment")
    is_result = isinstance(environment, dict) and "thinwire" in environment
    return is_result or data.get("written_by") == "thinwire" or {"fingerprint", "groups"} <= data.keys()


def existing_script(name: str) -> Path:
    """Return the path of a training script, before ranks are started; ``-m MODULE`` is returned as it is.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no Python; there is no such module.
    """
    if name.startswith("-m "):
        spec = spec_of(module := name.removeprefix("-m "), name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec_of(f"{module}.__main__", name)
    elif not os.path.isfile(name):  # False also where the directory may not be entered
        raise FileNotFoundError(f"there is no script {name}: give the path of a Python file")
    else:
        parsed(Path(name))
    return Path(name)


def refuse_with(context: typer.Context, reason: str, *names: str) -> None:
    """Raise ValueError if one of these options is on the command line, where it would be dropped for a ``reason``."""
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if source is not None and source.name == "COMMANDLINE" and param.opts[0] in names:
            raise ValueError(f"{reason}: leave out {param.opts[0]}")


def _why_not(path: Path, option: str) -> str | None:
    """Why a file cannot be written; None if it can, as far as can be said without writing it."""
    try:
        if path.is_dir():
            return f"{path} is a directory"
        if not path.parent.is_dir():
            return f"{path.parent} is not a directory"
        may_write = os.access(path if path.exists() else path.parent, os.W_OK)
        if may_write and path.is_file() and not _is_ours(path):
            return f"{path} exists, and thinwire did not write it: remove it, or name another file"
        if may_write and not path.exists():
            path.touch(exist_ok=False)  # what root may do in /proc, for example, is known only then
            path.unlink()
    except PermissionError:  # of a directory that may not be entered
        may_write = False
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    if not may_write:
        return f"{path} cannot be written: permission denied"
    if option == "--picture" and path.suffix.lower() not in PICTURES:
        return f"{path} is none of {', '.join(PICTURES)}"
    return None
