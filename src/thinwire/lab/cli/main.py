"""The `thinwire` command."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import ClassVar

import typer

from thinwire.lab.cli import output
from thinwire.lab.cli.commands import LazyGroup
from thinwire.lab.leave import leave

_EPILOG = """Example: thinwire demo

Exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted (Ctrl-C).

Completion in your shell: thinwire --install-completion
"""
_PACKAGES = ("torch", "numpy", "numba", "matplotlib", "pyroute2", "scikit-learn")


class _Commands(LazyGroup):
    prefix = "thinwire.lab.cli."
    lazy: ClassVar = {
        "demo": "Train one language model by stock DDP and by thinwire, in turn, and compare losses, step times"
        " and bytes.",
        "analyze": "Record which gradient rows a training script touches; predict bytes and seconds of every scheme on"
        " 2..1024 ranks.",
        "doctor": "Measure the link and a training, and say whether compression or fusion would pay. It may say: do"
        " nothing.",
        "holder": "Keep checkpoints in this host's memory, whatever becomes of the trainers; one holder for each host.",
        "bench": "Measure thinwire and its rivals on emulated hosts.",
        "plan": "Which gradients travel together, how they are compressed, and whether that pays at all.",
    }


app = typer.Typer(
    name="thinwire",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make PyTorch data-parallel training fast on the network you have.",
    epilog=_EPILOG,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thinwire {_installed('thinwire')}")
        typer.echo(f"python {platform.python_version()}, {platform.platform()}")
        typer.echo(", ".join(f"{name} {_installed(name)}" for name in _PACKAGES))
        raise typer.Exit


def _installed(package: str) -> str:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return "is not installed"


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print versions: thinwire, Python, packages."
    ),
) -> None:
    """Make PyTorch data-parallel training fast on the network you have."""


def _open_standard_streams() -> None:
    """Open /dev/null for those that are closed, as under cron; a socket would get their descriptor."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the lowest free descriptor
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w"))


def command() -> None:
    """Run the command line as a process of its own: `thinwire`, or `python -m thinwire`."""
    output.is_command = True
    _open_standard_streams()
    try:
        try:
            app(prog_name="thinwire")
        finally:
            sys.stdout.flush()
    except (SystemExit, BrokenPipeError) as ended:  # typer makes a SystemExit of a broken pipe
        status = getattr(ended, "code", 0)
        if isinstance(ended, BrokenPipeError) or isinstance(ended.__context__, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader, such as head, has seen enough
            status = getattr(ended.__context__, "code", 0)
        leave(status or 0)  # a rank of torchrun has a process group
