"""The list of commands: what each says of itself, and what its help imports."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from typer.testing import CliRunner

from tests.lab.cli.programs import GROUPS, all_commands, imported_by
from thinwire.lab.cli import main
from thinwire.lab.cli.commands import FORMER, OPTIONS, load


@pytest.mark.parametrize(
    ("module", "name", "description"),
    [(group.prefix + name, name, text) for group in GROUPS.values() for name, text in group.lazy.items()],
)
def test_a_listed_command_is_there_and_described_by_its_own_words(module: str, name: str, description: str) -> None:
    command = load(module, name)
    assert " ".join(command.help.split("\n\n")[0].split()) == description
    assert "xample" in command.help + (command.epilog or "") or name == "bench"


@pytest.mark.parametrize(("name", "command"), all_commands().items())
def test_a_command_says_an_example_and_has_json_and_quiet(name: str, command: Any) -> None:
    options = {text for param in command.params for text in param.opts}
    assert f"{name} " in command.help + (command.epilog or ""), "an example"
    assert "--json" in options
    assert ({"--quiet", "-q"} <= options) is (name not in ("thinwire holder", "thinwire plan show")), "shows progress"


@pytest.mark.parametrize(("name", "command"), all_commands().items())
def test_help_flows_and_flags_have_no_value(name: str, command: Any) -> None:
    """Line breaks of a docstring once cut its sentences, and flags had the value ``<bool>``."""
    assert "\n" not in command.help.replace("\n\n", "")
    ran = CliRunner().invoke(main.app, [*name.split()[1:], "--help"], env={"COLUMNS": "120"})
    assert ran.exit_code == 0
    assert "bool" not in ran.output


def test_options_of_one_name_mean_the_same_in_all_commands() -> None:
    """What two commands have is declared by `option`: one type, one metavar, one beginning of the help."""
    seen: dict[str, list[tuple[type, Any]]] = {}
    for command in all_commands().values():
        types = get_type_hints(command.callback)
        for param in command.params:
            for name in param.opts:
                if name.startswith("--") and name != "--help":
                    seen.setdefault(name, []).append((types[param.name], param))
    for name, params in seen.items():
        assert name not in FORMER or name == "--model", "old names are not in the help"
        assert len(params) == 1 or name in OPTIONS, name
        assert len({kind for kind, _ in params}) == 1, name
        text, metavar = OPTIONS.get(name, ("", params[0][1].metavar))
        assert {(param.help.startswith(text), param.metavar) for _, param in params} == {(True, metavar)}, name
    assert set(OPTIONS) <= set(seen)


@pytest.mark.slow
def test_no_help_imports_what_it_does_not_need() -> None:
    names = [name.removeprefix("thinwire ").split() for name in all_commands()]
    runs = [["--help"], ["--version"], ["bench", "--help"], *([*name, "--help"] for name in names)]
    line = "for arguments in {!r}: app(arguments, standalone_mode=False)"
    assert imported_by("from thinwire.lab.cli.main import app", line.format(runs)) == []
