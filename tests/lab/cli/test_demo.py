"""`thinwire demo`: links, JSON and what it refuses."""

import json
import platform
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import thinwire
from tests.lab.demo.results import comparison
from thinwire.lab.cli import demo as command
from thinwire.lab.cli.main import app
from thinwire.lab.demo.compare import Comparison
from thinwire.lab.demo.corpus import Corpus
from thinwire.lab.demo.summary import (
    NEXT,
)
from thinwire.lab.demo.train import TrainConfig
from thinwire.lab.testbed import network
from thinwire.lab.testbed.network import Link, NetAdminError


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[Link | None]:
    """Links that the command compares, instead of training."""
    seen: list[Link | None] = []

    def compare(
        _corpus: Corpus, _config: TrainConfig, _hosts: int, link: Link | None, on_step: Any, on_stage: Any
    ) -> Comparison:
        seen.append(link)
        on_step(1, 2, 4.25)
        return comparison(None if link is None or link.mbit is None else link.mbit)

    monkeypatch.setattr("thinwire.lab.demo.compare.compare", compare)
    monkeypatch.setattr("thinwire.lab.demo.corpus.load", lambda progress: Corpus(np.zeros(1, np.int32), ("a",)))
    return seen


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": "300"})


def allow_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "require_net_admin", lambda: None)


def refuse_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NetAdminError("no") from PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(network, "require_net_admin", refuse)


@pytest.mark.slow
def test_default_is_a_link_of_one_gigabit(
    links: list[Link | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("pyroute2")
    allow_hosts(monkeypatch)
    ran = run("--report", str(tmp_path / "r.html"), "--workers", "2")
    assert ran.exit_code == 0, ran.output
    assert links == [Link(1000.0)]
    assert "4.0x faster than this model under DDP" in ran.output
    assert ran.output.rstrip().endswith(NEXT)


@pytest.mark.slow
def test_loopback_with_the_reason_where_hosts_cannot_be_emulated(
    links: list[Link | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuse_hosts(monkeypatch)
    ran = run("--report", str(tmp_path / "r.html"))
    assert ran.exit_code == 0, ran.output
    assert links == [None]
    assert ran.output.count("bytes cost next to nothing; run this as root, or in a container with CAP_NET_ADMIN") == 1
    assert "Operation not permitted" in ran.output


def test_a_named_link_that_cannot_be_emulated_is_an_error(
    links: list[Link | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuse_hosts(monkeypatch)
    ran = run("--link", "1gbit", "--report", str(tmp_path / "r.html"))
    assert ran.exit_code == 1
    assert ran.output == "error: no\n"
    assert links == []


def test_without_pyroute2_the_default_is_loopback_and_a_named_link_an_error(
    links: list[Link | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    ran = run("--report", str(tmp_path / "r.html"))
    assert links == [None]
    assert "pip install '.[testbed]'" in ran.output
    ran = run("--link", "1gbit", "--report", str(tmp_path / "r.html"))
    assert ran.exit_code == 1
    assert links == [None]
    assert "pip install '.[testbed]'" in ran.output


def test_links_are_a_list_in_the_json(
    links: list[Link | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allow_hosts(monkeypatch)
    file = tmp_path / "out.json"
    ran = run("--links", "100mbit,1gbit", "--report", str(tmp_path / "r.html"), "--json", str(file))
    assert ran.exit_code == 0, ran.output
    assert links == [Link(100.0), Link(1000.0)]
    figures = json.loads(file.read_text())
    assert [one["link_mbit"] for one in figures["links"]] == [100.0, 1000.0]
    assert {"steps", "variants", "step_seconds"} <= figures["links"][1].keys()
    assert figures["link_mbit"] == 1000.0, "the link nearest to 1 Gbit/s, as without --links"
    assert "On none of these links is thinwire slower" in ran.output


@pytest.mark.slow
def test_the_json_names_versions_date_machine_and_command(
    links: list[Link | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allow_hosts(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["/bin/thinwire", "demo", "--link", "1gbit"])
    file = tmp_path / "out.json"
    ran = run("--link", "1gbit", "--report", str(tmp_path / "r.html"), "--json", str(file))
    assert ran.exit_code == 0, ran.output
    environment = json.loads(file.read_text())["environment"]
    assert {"torch", "system", "machine"} <= environment.keys()
    assert environment["thinwire"] == thinwire.__version__
    assert environment["python"] == platform.python_version()
    assert datetime.fromisoformat(environment["date"]).tzinfo is not None
    assert environment["links_nominal_mbit"] == [1000.0]
    assert environment["command"] == "thinwire demo --link 1gbit"


def test_help_has_an_example() -> None:
    assert "thinwire demo --links 100mbit,1gbit,10gbit" in run("--help").output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--link", "100mph"],
        ["--links", "100mbit,none"],
        ["--links", "100mbit", "--link", "1gbit"],
        ["--hosts", "0"],
        ["--steps", "0"],
        ["--report", "/no/such/folder/report.html"],
        ["--picture", "/no/such/folder/demo.svg"],
    ],
)
def test_bad_options_are_refused_before_any_work(arguments: list[str], links: list[Link | None]) -> None:
    ran = run(*arguments)
    assert ran.exit_code == 2
    assert arguments[0] in re.sub(r"\x1b\[[0-9;]*m", "", ran.output)
    assert links == []
