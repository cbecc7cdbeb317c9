"""``thinwire demo``: one language model trained by stock DDP and by thinwire, with dense and with sparse gradients."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from thinwire.cli import output
from thinwire.cli.commands import Command, option
from thinwire.cli.output import OnProgress, check_directories, clear_errors, console_for, plain_table, write_json
from thinwire.errors import missing_package

if TYPE_CHECKING:
    from thinwire.lab.demo.compare import Comparison
    from thinwire.lab.demo.corpus import Corpus
    from thinwire.lab.testbed.network import Link

_DEFAULT_LINK = "1gbit"
_HEARTBEAT_SECONDS = 0.5

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def demo(
    hosts: int = option("--hosts", 4, ", one rank each; on loopback the ranks", min=1, max=250),
    steps: int = option("--steps", None, " of each variant; by default as many as fit into 40 seconds", min=1),
    link: str = option("--link", None, "; by default 1gbit, or none (loopback) where hosts cannot be emulated"),
    links: str = typer.Option(
        None, "--links", metavar="RATES", help="Several links, comma-separated, for a curve of step time against link."
    ),
    json_path: Path = option("--json"),
    report: Path = option("--report", Path("report.html")),
    picture: Path = option("--picture"),
    seed: int = option("--seed", 0, min=0),
    quiet: bool = option("--quiet", False),
) -> None:
    """Train one language model by stock DDP and by thinwire, in turn, and compare losses, step times and bytes.

    Four variants: the model with default nn.Embedding under DDP, the same after thinwire.attach, and both with
    nn.Embedding(sparse=True). The text is the source of Python's standard library.

    Example: thinwire demo --links 100mbit,1gbit,10gbit
    """
    check_directories({"--report": report, "--json": json_path, "--picture": picture})
    console = console_for(json_path)
    from thinwire.lab.testbed.launch import RanksFailed
    from thinwire.lab.testbed.network import NetAdminError

    with clear_errors(NetAdminError, RanksFailed):
        chosen = _links(console, link, links)
        comparisons = _compare(hosts, steps, chosen, seed, quiet)
    _print(console, comparisons)
    from thinwire.lab.demo.report import environment, write_picture, write_report
    from thinwire.lab.demo.summary import NEXT, headline

    write_report(comparisons, report)
    console.print(f"Plots and all figures: {report}", markup=False, highlight=False)
    if picture is not None:
        write_picture(comparisons, picture)
    nominal = [None if one is None else one.mbit for one in chosen]
    figures = {"environment": {**environment(), "links_nominal_mbit": nominal}, **headline(comparisons).to_json()}
    if links is not None:
        figures["links"] = [one.to_json() for one in comparisons]
    write_json(figures, json_path)
    console.print(NEXT, highlight=False)


def _links(console: Console, link: str | None, links: str | None) -> "list[Link | None]":
    """Return the links to emulate; None is loopback, the default where hosts cannot be emulated.

    Raises:
        NetAdminError: a link was named, and hosts cannot be emulated.
        MissingPackageError: a link was named, and there is no pyroute2.
    """
    from thinwire.lab.testbed.network import require_net_admin

    if link is not None and links is not None:
        raise typer.BadParameter("give --link or --links, not both", param_hint="--links")
    if link is None and links is None:
        reason = _why_not_emulated()
        if reason:
            console.print(reason, highlight=False, markup=False, soft_wrap=True)
            return [None]
    elif link == "none":
        return [None]
    name = "--link" if links is None else "--links"
    chosen: list[Link | None] = [_parsed(text, name) for text in (links or link or _DEFAULT_LINK).split(",")]
    if find_spec("pyroute2") is None:
        raise missing_package("pyroute2", "a network of emulated hosts")
    require_net_admin()
    return chosen


def _parsed(text: str, name: str) -> "Link":
    from thinwire.lab.testbed.network import Link

    try:
        link = Link.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=name) from error
    if link.mbit is None:
        raise typer.BadParameter("none cannot be one of several links", param_hint=name)
    return link


def _why_not_emulated() -> str:
    """Return a sentence that says why hosts cannot be emulated here, and what to do; "" if they can."""
    from thinwire.lab.testbed.network import NetAdminError, require_net_admin, restart_as_root_of_a_user_namespace

    loopback = "all ranks share the loopback of this machine, where bytes cost next to nothing"
    if find_spec("pyroute2") is None:
        return f"Emulated hosts need pyroute2 (pip install 'thinwire[testbed]'), so {loopback}."
    try:
        require_net_admin()
    except NetAdminError as error:
        if output.is_command:
            restart_as_root_of_a_user_namespace()  # which returns where that does not help
        why = getattr(error.__cause__, "strerror", None) or "not allowed"
        return (
            f"Hosts cannot be emulated here (network namespaces: {why}), so {loopback}; run this as root, or in a"
            " container with CAP_NET_ADMIN and CAP_SYS_ADMIN, to see a link of 1 Gbit/s."
        )
    return ""


def _compare(
    hosts: int, steps: int | None, links: "Sequence[Link | None]", seed: int, quiet: bool
) -> "list[Comparison]":
    from thinwire.lab.demo.compare import compare
    from thinwire.lab.demo.train import TrainConfig

    comparisons = []
    with _progress("Reading the source of Python's standard library", quiet) as on_progress:
        text = _corpus(on_progress)
        for link in links:
            where = "loopback" if link is None or link.mbit is None else f"links of {link.mbit:,.0f} Mbit/s"

            def on_step(done: int, total: int, loss: float, where: str = where) -> None:
                on_progress(f"Training on {where}, loss {loss:.6f}, step", done, total)

            on_progress(f"Starting {hosts} ranks on {where}", 0, 0)
            comparisons.append(compare(text, TrainConfig(steps=steps, seed=seed), hosts, link, on_step))
    return comparisons


def _corpus(on_progress: OnProgress) -> "Corpus":
    from thinwire.lab.demo import corpus

    return corpus.load(progress=lambda done, files: on_progress(done=done, total=files))


@contextmanager
def _progress(description: str, quiet: bool) -> Iterator[OnProgress]:
    """Show progress, also during a long step: a dense step of stock DDP takes 18 s at 100 Mbit/s."""
    done = threading.Event()
    with output.progress(description, quiet=quiet) as on_progress:

        def beat() -> None:
            while not done.wait(_HEARTBEAT_SECONDS):
                on_progress()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield on_progress
        finally:
            done.set()
            thread.join()


def _print(console: Console, comparisons: "Sequence[Comparison]") -> None:
    from thinwire.lab.demo import summary

    first = summary.headline(comparisons)
    console.print(summary.conditions(first), highlight=False)
    table = plain_table()
    for place, name in enumerate(summary.COLUMNS):
        table.add_column(name, justify="right" if place else "left")
    for row in summary.rows(first):
        table.add_row(*row)
    console.print(table)
    if len(comparisons) > 1:
        curve = plain_table("Step")
        curve.add_column("")
        for one in comparisons:
            curve.add_column(summary.format_link(one.link_mbit), justify="right")
        for row in summary.link_rows(comparisons):
            curve.add_row(*row)
        console.print(curve)
        for sentence in summary.losing_points(comparisons):
            console.print(sentence, highlight=False)
    for sentence in (summary.result(first), summary.advice(first), summary.exactness(first)):
        console.print(sentence, highlight=False)
