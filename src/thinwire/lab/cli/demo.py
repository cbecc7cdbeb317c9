"""``thinwire demo``: one language model trained by stock DDP and by thinwire, with dense and with sparse gradients."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from thinwire.lab.cli import output
from thinwire.lab.cli.commands import Command, option
from thinwire.lab.cli.output import clear_errors, open_console, say, show_table, write_json
from thinwire.lab.missing import missing_package

if TYPE_CHECKING:
    from thinwire.lab.demo.compare import Comparison
    from thinwire.lab.testbed.network import Link

_DEFAULT_LINK = "1gbit"

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def demo(
    hosts: int = option("--hosts", 4, ", one rank each; on loopback the ranks", min=1, max=250),
    steps: int = option("--steps", None, " of each variant; by default 2 and as many as fit in 30 seconds", min=1),
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
    console = open_console({"--report": report, "--json": json_path, "--picture": picture})
    with clear_errors(ValueError):
        chosen = _links(console, link, links)
    with clear_errors():
        comparisons = _compare(hosts, steps, chosen, seed, quiet)
    _print(console, comparisons)
    from thinwire.lab.demo.report import build_report, environment, write_picture
    from thinwire.lab.demo.summary import NEXT, headline

    with clear_errors():
        build_report(comparisons).write(report)
        say(console, f"Plots and all figures: {report}")
        if picture is not None:
            write_picture(comparisons, picture)
    nominal = [None if one is None else one.mbit for one in chosen]
    figures = {"environment": {**environment(), "links_nominal_mbit": nominal}, **headline(comparisons).to_json()}
    if links is not None:
        figures["links"] = [one.to_json() for one in comparisons]
    with clear_errors():
        write_json(figures, json_path)
    console.print(NEXT, highlight=False)


def _links(console: Console, link: str | None, links: str | None) -> "list[Link | None]":
    """Return the links to emulate; None is loopback, the default where hosts cannot be emulated.

    Raises:
        ValueError: a link that is none.
        NetAdminError: a link was named, and hosts cannot be emulated.
        MissingPackageError: a link was named, and there is no pyroute2.
    """
    from thinwire.lab.testbed.network import require_net_admin

    if link is not None and links is not None:
        raise ValueError("give --link or --links, not both")
    if link is None and links is None:
        reason = _why_not_emulated()
        if reason:
            say(console, reason)
            return [None]
    elif link == "none":
        return [None]
    name, given = ("--links", links) if links is not None else ("--link", _DEFAULT_LINK if link is None else link)
    chosen: list[Link | None] = [_parsed(text, name) for text in given.split(",")]
    if find_spec("pyroute2") is None:
        raise missing_package("pyroute2", "a network of emulated hosts")
    require_net_admin()
    return chosen


def _parsed(text: str, name: str) -> "Link":
    from thinwire.lab.testbed.network import Link

    try:
        link = Link.parse(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if link.mbit is None:
        raise ValueError(f"{name}: none cannot be one of several links")
    return link


def _why_not_emulated() -> str:
    """Return a sentence that says why hosts cannot be emulated here, and what to do; "" if they can."""
    from thinwire.lab.testbed.network import NetAdminError, require_net_admin, restart_as_root_of_a_user_namespace

    loopback = "all ranks share the loopback of this machine, where bytes cost next to nothing"
    if find_spec("pyroute2") is None:
        return f"Emulated hosts need pyroute2 (pip install '.[testbed]' in a checkout), so {loopback}."
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
    from thinwire.lab.demo import corpus
    from thinwire.lab.demo.compare import compare
    from thinwire.lab.demo.train import TrainConfig

    comparisons = []
    with output.progress("Reading the source of Python's standard library", quiet=quiet) as on_progress:
        text = corpus.load(progress=lambda done, files: on_progress(done=done, total=files))
        for link in links:
            where = "loopback" if link is None or link.mbit is None else f"links of {link.mbit:,.0f} Mbit/s"

            def on_step(done: int, total: int, loss: float, where: str = where) -> None:
                on_progress(f"Training on {where}, loss {loss:.6f}, step", done, total)

            comparisons.append(compare(text, TrainConfig(steps=steps, seed=seed), hosts, link, on_step, on_progress))
    return comparisons


def _print(console: Console, comparisons: "Sequence[Comparison]") -> None:
    from thinwire.lab.demo import summary

    first = summary.headline(comparisons)
    console.print(summary.conditions(first), highlight=False)
    show_table(console, summary.COLUMNS, summary.rows(first), texts=summary.COLUMNS[:1])
    sentences = [summary.result(first), summary.advice(first), summary.exactness(first)]
    if len(comparisons) > 1:
        links = [summary.format_link(one.link_mbit) for one in comparisons]
        show_table(console, ["", *links], summary.link_rows(comparisons), "Step", texts=("",))
        sentences = [*summary.losing_points(comparisons), *sentences]
    for sentence in sentences:
        console.print(sentence, highlight=False)
