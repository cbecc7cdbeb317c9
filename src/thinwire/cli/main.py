"""The `thinwire` command."""

from __future__ import annotations

import typer

from thinwire import __version__
from thinwire.cli import output
from thinwire.cli.analyze import CONTEXT_SETTINGS, analyze
from thinwire.cli.bench import bench
from thinwire.cli.demo import demo
from thinwire.cli.doctor import EXAMPLES, doctor
from thinwire.cli.holder import holder
from thinwire.cli.plan import plan

app = typer.Typer(
    name="thinwire",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make PyTorch data-parallel training fast on the network you have.",
)
app.command()(demo)
app.command(context_settings=CONTEXT_SETTINGS)(analyze)
app.command(context_settings=CONTEXT_SETTINGS, epilog=EXAMPLES)(doctor)
app.command(epilog="Example: thinwire holder --bind 10.0.0.1 --secret-file job.secret --memory-budget 64GiB")(holder)
app.add_typer(bench, name="bench")
app.add_typer(plan, name="plan")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thinwire {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Make PyTorch data-parallel training fast on the network you have."""


def command() -> None:
    """Run the command line as a process of its own: `thinwire`, or `python -m thinwire`."""
    output.is_command = True
    app(prog_name="thinwire")
