"""A group of commands whose modules are imported when one of them is called: `thinwire --help` waits for no torch."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption


class LazyGroup(TyperGroup):
    """A group that knows the names, one-line descriptions and modules of its commands.

    Subclasses list for each command its module, in which a `typer.Typer` called ``app`` is the command, and its
    description.
    """

    lazy: ClassVar[dict[str, tuple[str, str]]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the entry that `--help` lists; `resolve_command` returns the command to call."""
        if cmd_name not in self.lazy:
            return None
        return TyperCommand(cmd_name, help=self.lazy[cmd_name][1])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load(self.lazy[name][0], name), rest


def load(module: str, name: str) -> Any:
    """Import the command of a module and name it ``name``."""
    command: Any = typer.main.get_command(import_module(module).app)
    command.name = name
    return command


class ScriptCommand(TyperCommand):
    """A command with a script and its arguments, as torchrun has.

    Arguments behind ``SCRIPT.py`` go to the script, except options that are in this command's help and nowhere in the
    text of the script.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._sorted(args))

    def _sorted(self, args: list[str]) -> list[str]:
        """Our options first, then ``--``, the script, and its own arguments."""
        place = next((place for place, text in enumerate(args) if text == "--" or text.endswith(".py")), None)
        if place is None or args[place] == "--":
            return args
        ours, theirs = args[:place], args[place + 1 :]
        own: list[str] = []
        while theirs:
            text = theirs.pop(0)
            values = self._values_of(text.partition("=")[0], args[place])
            if values is None:
                own.append(text)
            else:
                taken = 0 if "=" in text else values
                ours += [text, *theirs[:taken]]
                del theirs[:taken]
        return [*ours, "--", args[place], *own]

    def _values_of(self, option: str, script: str) -> int | None:
        """Number of values of an option of this command; None if it is none, or the script has it too."""
        for param in self.params:
            if isinstance(param, TyperOption) and option in (*param.opts, *param.secondary_opts):
                return None if _mentions(Path(script), option) else 0 if param.is_flag else param.nargs
        return 0 if option == "--help" and not _mentions(Path(script), option) else None


def _mentions(script: Path, option: str) -> bool:
    """Whether the text of the script contains an option."""
    if not script.is_file():
        return False
    text = script.read_text(errors="replace")
    return re.search(rf"{re.escape(option)}\b", text) is not None
