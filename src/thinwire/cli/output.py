"""What all subcommands share: JSON to a file or standard output, and errors without a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

STDOUT = Path("-")


def console_for(json_path: Path | None) -> Console:
    """Where tables and progress go: standard output, or standard error when that carries the JSON."""
    return Console(stderr=json_path == STDOUT)


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
    """Turn the errors that a user can mend into one line and exit status 2."""
    try:
        yield
    except expected as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
