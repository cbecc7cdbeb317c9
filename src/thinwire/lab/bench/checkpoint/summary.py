"""Summary of the comparison in words and table rows, for the terminal and for the report. Pure functions."""

from collections.abc import Sequence
from typing import Any

from thinwire.lab.bench.train.summary import link_text
from thinwire.lab.text import figure

COLUMNS = ("method", "s/step", "ratio", "blocked", "wasted", "killed", "host", "link", "lost", "equal")
CAPTION = (
    "s/step: median iteration; ratio: to none, paired by turns; blocked: ms that training stands still for one; wasted:"
    " seconds, by a failure, on average; killed: seconds until ready after all trainers died; host: after a host was"
    " lost too; link: share of it in fetching its state; lost: iterations, at most; equal: losses and parameters"
    " bitwise as if nothing had happened."
)


def table_rows(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the cells under `COLUMNS`."""
    return [
        [
            row["method"] + (f": {row['unavailable']}" if row.get("unavailable") else ""),
            figure(row["iteration_seconds_median"], ".4f"),
            figure(row["overhead_ratio"], ".3f"),
            figure(_blocked_ms(row), ",.1f"),
            figure(row["wasted_seconds"], ".2f"),
            figure(row["recovery_seconds_processes"], ".2f"),
            figure(row["recovery_seconds_host"], ".2f"),
            figure(row["recovery_link_share"], ".0%"),
            figure(row["iterations_lost"], ".2f"),
            {None: "-", True: "yes", False: "NO"}[row["restore_bitwise_equal"]],
        ]
        for row in rows
    ]


def _blocked_ms(row: dict[str, Any]) -> float | None:
    """Return the milliseconds that training stands still for one checkpoint of the state that was measured."""
    per_gb = row["blocking_ms_per_gb"]
    return None if per_gb is None else per_gb * row["state_bytes"] / 1e9


def conditions(result: dict[str, Any]) -> str:
    """Return job, hosts, link and iterations in one line."""
    first, environment = result["rows"][0], result["environment"]
    return (
        f"{environment['job']}: {first['state_bytes'] / 1e6:,.2f} MB of state a host,"
        f" {environment['replicas']} replicas, {1e3 * environment['compute_seconds']:.0f} ms of a step asleep;"
        f" {first['hosts']} hosts, {link_text(first)}; {environment['iterations']} iterations a method"
    )


def sentences(result: dict[str, Any]) -> list[str]:
    """Return sentences on the bound and the measured values, the cost of rarer checkpoints, and what each one costs."""
    return [*_bound(result["environment"]["bounds"]), *_baselines(result), *_costs(result["rows"])]


def _costs(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How often a checkpoint was made, the iterations at risk (since one began to be safe), its seconds of a core with
    the holder's, and the spread of the ratio."""
    texts = []
    for row in rows:
        spread, every, cpu = (row.get(name) for name in ("overhead_spread", "interval_iterations", "cpu_seconds"))
        if spread is not None and every is not None:
            core = "" if cpu is None else f", {cpu:.3f} s of a core for one"
            at_risk = every + (row.get("checkpoint_seconds") or 0.0) / row["iteration_seconds_median"]
            texts.append(
                f"{row['method']}: a checkpoint every {every:.1f} iterations, {at_risk:.1f} at risk at most{core},"
                f" ratio {spread[0]:.2f} to {spread[1]:.2f} by turns."
            )
    return texts


def _bound(bound: dict[str, Any] | None) -> list[str]:
    if bound is None:
        return ["No bound: the speed of the link is not known."]
    best = bound["interval_iterations"]
    interval, seconds = bound["reached_interval_iterations"], bound["reached_checkpoint_seconds"]
    allows = (
        "one checkpoint in every iteration fits"
        if best == 1
        else f"the bound does NOT allow one checkpoint per iteration, at best one in {best}"
    )
    reached = (
        "none was made"
        if interval is None
        else f"one in {interval:.2f}, safe {seconds:.3f} s after the step,"
        f" {seconds / bound['network_seconds']:.2f}x the time on the link"
    )
    return [
        f"Bound: a checkpoint takes {bound['network_seconds']:.3f} s of a link and {1e3 * bound['copy_seconds']:.1f} ms"
        f" of copying, and links are idle for {bound['idle_seconds']:.3f} of the {bound['iteration_seconds']:.3f} s of"
        f" an iteration: {allows}.",
        f"Reached by thinwire: {reached}. Bytes are granted {bound['grants']}.",
    ]


def _baselines(result: dict[str, Any]) -> list[str]:
    environment = result["environment"]
    strawman, frequent = environment["strawman_wasted_seconds"], environment["high_frequency_wasted_seconds"]
    if strawman is None:
        return []
    return [
        f"Wasted with a remote store that all hosts reach at the speed of one link: {strawman:,.0f} s with a checkpoint"
        f" every 3 hours (Strawman), {frequent:,.1f} s with as many as it takes (HighFreq)."
    ]
