"""Common parts of all subcommands: style of tables, JSON to a file or standard output, errors without a traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

STDOUT = Path("-")
PIPE_COLUMNS = 160
"""Width of a pipe or a file, where nothing has to fit a window: no cell of a table is cut."""
is_command = False
"""Whether this process is the command, and not one that calls it."""


def console_for(json_path: Path | None) -> Console:
    """Return the console for tables and progress: standard output, or standard error when that carries the JSON."""
    console = Console(stderr=json_path == STDOUT)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_COLUMNS
    return console


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


def write_json(result: dict[str, Any], path: Path | None) -> None:
    """Write a result to a file, to standard output for ``-``, or nowhere for None."""
    if path is None:
        return
    text = json.dumps(result, indent=2) + "\n"
    if path == STDOUT:
        typer.echo(text, nl=False)
    else:
        path.write_text(text)


@contextmanager
def clear_errors(*expected: type[Exception]) -> Iterator[None]:
    """Turn errors that the user can correct into one line and exit status 2.

    A command that lacks the right to make emulated hosts restarts where it has it, before it reports an error.
    """
    try:
        yield
    except expected as error:
        if is_command and type(error).__name__ == "NetAdminError":
            from thinwire.lab.testbed.network import restart_as_root_of_a_user_namespace

            restart_as_root_of_a_user_namespace()
        message = f"[bold red]error:[/] {escape(str(error))}"
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


def check_directories(paths: dict[str, Path | None]) -> None:
    """Check before any measurement that the files named by options can be written.

    Raises:
        typer.BadParameter: the folder of one does not exist, or it is a folder itself.
    """
    for option, path in paths.items():
        if path is None or path == STDOUT:
            continue
        if not path.parent.is_dir():
            raise typer.BadParameter(f"{path.parent} is not a directory", param_hint=option)
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a directory", param_hint=option)
