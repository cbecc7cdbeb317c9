"""What all commands share: groups that import a command when it is called, names of options, a script's arguments."""

import shutil
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from thinwire.lab.bench.in_job import is_first_rank

OPTIONS: dict[str, tuple[str, str | None]] = {
    "--ranks": ("Processes of a script, all on this machine", "N"),
    "--hosts": ("Emulated hosts", "N"),
    "--ranks-per-host": ("Ranks that share the link of a host", "N"),
    "--link": ("Speed of each host's link, such as 100mbit or 1gbit", "RATE"),
    "--job": ("What to train", "JOB"),
    "--methods": ("Methods to compare, comma-separated", "NAMES"),
    "--compress": (
        "Compressors to consider, comma-separated; none for exact ways only, auto for those that suit the optimizer",
        "NAMES",
    ),
    "--dense": ("How gradients that are not compressed are summed: auto, native or lossless", "HOW"),
    "--dtype": ("Dtype of values", "DTYPE"),
    "--scale": ("Size as a share of the published one", "FACTOR"),
    "--steps": ("Training steps", "N"),
    "--repeat": ("Turns; in each turn, every method is measured once", "N"),
    "--seed": ("Seed of all random numbers", "N"),
    "--fresh": ("Measure link and compressors again, and forget what is cached", None),
    "--from": ("Read a file that thinwire plan --measurement wrote, instead of measuring", "FILE"),
    "--output": ("Write the plan here, for thinwire.attach(model, dense=plan)", "FILE"),
    "--report": ("Write an HTML page with plots and all figures here", "FILE"),
    "--picture": ("Draw the plot here: .png, .svg or .pdf", "FILE"),
    "--compare": ("Compare the median seconds with an earlier --json", "FILE"),
    "--json": ("Write the figures as JSON here; - for standard output", "FILE"),
    "--quiet": ("Print no progress, only the result", None),
}
"""The options that several commands have: how the help begins, and what it calls the value."""
MODULE = "-m "
"""How a module begins where a script is expected."""
NARROW = 60
"""Columns of a window below which help has no boxes."""
FORMER: dict[str, tuple[str, ...]] = {
    "--workers": ("--ranks", "--hosts"),
    "--html": ("--report",),
    "--model": ("--example",),
}
"""Old names of options, which stay accepted, and the new ones; a command has at most one of these."""


def option(name: str, default: Any = None, more: str = "", **limits: Any) -> Any:
    """Declare an option of `OPTIONS`; ``more`` goes on with its help, ``limits`` are typer's."""
    text, metavar = OPTIONS[name]
    names = (name, "-q") if name == "--quiet" else (name,)
    shown = default is not None and metavar is not None
    return typer.Option(default, *names, metavar=metavar, help=f"{text}{more}.", show_default=shown, **limits)


def listed(text: str) -> tuple[str, ...]:
    """Return the entries of a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def announce(target: str) -> None:
    """Say on standard error, also with ``--quiet``, what a user's script or job may do, before it runs."""
    if is_first_rank() and not target.isalnum():  # the names of our jobs are words
        typer.echo(
            f"{target} runs as it is: what it saves by itself, as by torch.save, is saved, and thinwire cannot help it."
            "\nCheckpoints of thinwire are neither restored nor saved meanwhile. A script is ended in mid-training, and"
            " none of its `except`, `finally` and `atexit` runs then.",
            err=True,
        )


class _NarrowHelp:
    """Help without boxes where the window is too narrow for their columns, which would cut the names of options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if shutil.get_terminal_size().columns < NARROW:
            self.rich_markup_mode = None
        super().format_help(ctx, formatter)  # pyrefly: ignore

    def get_params(self, ctx: Any) -> list[Any]:
        """Drop the value that typer shows for a flag, ``<bool>``: it takes none."""
        params = super().get_params(ctx)  # pyrefly: ignore
        for param in params:
            if isinstance(param, TyperOption) and param.is_flag:
                param.metavar = ""
        return params


class CommandGroup(_NarrowHelp, TyperGroup):
    """A group of commands."""


class LazyGroup(CommandGroup):
    """A group that knows the names and one-line descriptions of its commands.

    Subclasses list the description of each command. What the name of its module begins with is ``prefix``; in it a
    `typer.Typer` called ``app`` is the command.
    """

    prefix: ClassVar[str] = ""
    lazy: ClassVar[dict[str, str]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the entry that `--help` lists; `resolve_command` returns the command to call."""
        return TyperCommand(cmd_name, help=self.lazy[cmd_name]) if cmd_name in self.lazy else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load(self.prefix + name, name), rest


def load(module: str, name: str) -> Any:
    """Import the command of a module and name it ``name``."""
    command: Any = typer.main.get_command(import_module(module).app)
    command.name = name
    return command


class Command(_NarrowHelp, TyperCommand):
    """A command that also accepts the former names of its options."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # The lines of each paragraph are joined: typer keeps the breaks after the first one.
        self.help = "\n\n".join(" ".join(text.split()) for text in (self.help or "").split("\n\n"))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Show arguments as their metavar has them, without brackets around brackets."""
        names = [str(param.metavar) for param in self.params if isinstance(param, TyperArgument) and param.metavar]
        return [self.options_metavar or "", *names] if names else super().collect_usage_pieces(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [self._current(text) for text in args[:end]] + args[end:])

    def _current(self, text: str) -> str:
        """The name in use today, if ``text`` is an option of a former name, else ``text``."""
        name, equals, value = text.partition("=")
        own = {option for param in self.params for option in param.opts}
        news = [new for new in FORMER.get(name, ()) if new in own and name not in own]
        return f"{news[0]}{equals}{value}" if news else text


class ScriptCommand(Command):
    """A command with a script and its arguments, as torchrun has: all that is behind ``SCRIPT.py`` is the script's.

    ``-m MODULE`` is taken for a script, too, and given to the command as one argument.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._sorted(args))

    def _sorted(self, args: list[str]) -> list[str]:
        """Our options first, then ``--``, the script, and its own arguments."""
        index = next((index for index, text in enumerate(args) if text in ("--", "-m") or text.endswith(".py")), None)
        if index is None:
            return args
        ours, theirs = args[:index], args[index + (args[index] == "--") :]
        if theirs[:1] == ["-m"]:
            theirs = [MODULE + "".join(theirs[1:2]), *theirs[2:]]
        own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        given = [text for text in theirs[1:] if self._current(text).partition("=")[0] in own]
        if given and args[index] != "--":
            typer.echo(f"{given[0]} behind {theirs[0]} goes to it: put {self.name}'s options first.", err=True)
        return [*ours, "--", *theirs]
