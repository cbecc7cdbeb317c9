"""``thinwire plan --model``: a plan for a published model, from published figures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from thinwire.cli.output import plain_table, write_json
from thinwire.lab.espresso.collectives import cost_table
from thinwire.lab.espresso.published import PublishedPlan, plan_published, published_cluster
from thinwire.lab.testbed.network import Link
from thinwire.plan.explain import counted, format_bytes, format_seconds


def show_published(
    model: str,
    hosts: int,
    ranks_per_host: int,
    link: str,
    inside: str,
    console: Console,
    output: Path | None,
    json_path: Path | None,
) -> None:
    """Plan for a published model, print the plan, and write it.

    Raises:
        ValueError: an unknown model, link or number of hosts.
    """
    mbit = Link.parse(link).mbit
    if mbit is None:
        raise ValueError("a published model is planned for a link with a rate: give --link such as 25gbit")
    found = plan_published(model, published_cluster(hosts, ranks_per_host, mbit, inside))
    _print(found, console)
    if output is not None:
        found.plan.save(output)
        console.print(f"Plan: [bold]{output}[/]", highlight=False, soft_wrap=True)
    write_json(_figures(found), json_path)


def _print(found: PublishedPlan, console: Console) -> None:
    from thinwire.cli.plan import print_costs

    model, cluster, strategy, plan = found.model, found.cluster, found.strategy, found.plan
    rows = cost_table(cluster.world_size, sum(model.size_bytes), cluster.inter)
    print_costs(rows, cluster.inter, cluster.world_size, sum(model.size_bytes), console)
    console.print(plan.explain(), end="", highlight=False, markup=False, soft_wrap=True)
    other = model.other_seconds
    table = plain_table(
        title=f"{model.name}: {model.num_tensors} tensors, {format_bytes(sum(model.size_bytes))}, on {cluster.hosts} x"
        f" {counted(cluster.ranks_per_host, 'rank')}"
    )
    for column in ("whole step", "predicted", "faster"):
        table.add_column(column, justify="left" if column == "whole step" else "right")
    stock = other + plan.dense_seconds
    for name, seconds in (
        ("stock DDP", plan.dense_seconds),
        (f"fusion: {plan.choice}", plan.predicted_seconds),
        (f"Espresso: {len(strategy.compressed)} tensors compressed", strategy.iteration_seconds),
        ("Espresso's upper bound: compression for nothing", strategy.upper_bound_seconds),
    ):
        table.add_row(name, format_seconds(other + seconds), f"{stock / (other + seconds):.2f}x")
    console.print(table)


def _figures(found: PublishedPlan) -> dict[str, object]:
    model, cluster, strategy = found.model, found.cluster, found.strategy
    return {
        "plan": found.plan.to_json(),
        "model": {"name": model.name, "tensors": model.num_tensors, "bytes": sum(model.size_bytes)},
        "cluster": {"hosts": cluster.hosts, "ranks_per_host": cluster.ranks_per_host, "name": cluster.name},
        "espresso": {
            "predicted_seconds": strategy.iteration_seconds,
            "upper_bound_seconds": strategy.upper_bound_seconds,
            "compressed_tensors": len(strategy.compressed),
            "choices": [str(choice) for choice in strategy.choices],
        },
        "costs": [asdict(row) for row in cost_table(cluster.world_size, sum(model.size_bytes), cluster.inter)],
    }
