"""Summary of the comparison in words and table rows, for the terminal and for the report."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from thinwire.lab.demo.compare import Comparison, ModeResult
from thinwire.lab.demo.train import LOOPBACK_SCHEME, MODES


def format_bytes(value: float) -> str:
    """Format a number of bytes: ``format_bytes(4_831_080) == '4.83 MB'`` (decimal units)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def format_seconds(value: float) -> str:
    """Format a time: ``format_seconds(0.1234) == '123 ms'``."""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def conditions(comparison: Comparison) -> str:
    """Return workers, link, model and text in one line."""
    config = comparison.config
    mbit = comparison.link_mbit
    link = "loopback" if mbit is None else f"emulated hosts, {mbit:.0f} Mbit/s measured"
    return (
        f"{comparison.workers} workers on {link}; {config.steps} steps, seed {config.seed}; LSTM language "
        f"model, two tables of {comparison.num_words:,} x {config.embedding_dim}; "
        f"text of {comparison.num_tokens:,} words"
    )


def conclusion(comparison: Comparison) -> str:
    """Return one honest sentence on bytes and step times."""
    ddp, thinwire = (comparison.modes[mode] for mode in MODES)
    fewer = ddp.bytes_per_step / thinwire.bytes_per_step
    faster = float(np.median(ddp.step_seconds) / np.median(thinwire.step_seconds))
    bytes_part = f"thinwire sent {fewer:.2f}x fewer bytes than stock DDP for the same losses"
    if comparison.link_mbit is None:
        return (
            f"{bytes_part}; on loopback bytes cost next to nothing, so expect little or no gain in step time "
            f"({faster:.2f}x here, scheme={LOOPBACK_SCHEME}): see a slow link with `thinwire demo --link 100mbit`."
        )
    return f"{bytes_part}, and a step was {faster:.2f}x as fast on a link of {comparison.link_mbit:.0f} Mbit/s."


def summary_rows(comparison: Comparison) -> list[list[str]]:
    """Return rows of (what, stock DDP, thinwire); cells that span both modes repeat their text."""
    results = [comparison.modes[mode] for mode in MODES]
    difference = f"{comparison.loss_difference.max():.1e}"

    def row(what: str, cells: Sequence[str]) -> list[str]:
        return [what, *cells]

    rows = [
        row("loss, first step", [f"{mode.loss[0]:.6f}" for mode in results]),
        row("loss, last step", [f"{mode.loss[-1]:.6f}" for mode in results]),
        row("max relative loss difference", ["", difference]),
        row("parameters bitwise equal", ["yes" if mode.parameters_bitwise_equal else "NO" for mode in results]),
        row("bytes per step and rank", [format_bytes(mode.bytes_per_step) for mode in results]),
        row("communication time per step", [_median(mode.comm_seconds) for mode in results]),
        row("step time", [_median(mode.step_seconds) for mode in results]),
    ]
    rows += [
        row(f"density of {name}, after sum", [_density(mode, name) for mode in results])
        for name in comparison.sparse_parameters
    ]
    # In Gloo's gather a rank also sends rows of others, so that the formula knows the mean over ranks only.
    rows.append(row("imbalance of bytes, max / mean rank", ["-", f"{results[1].imbalance:.3f}"]))
    return rows


def _median(seconds: Any) -> str:
    return format_seconds(float(np.median(seconds)))


def _density(mode: ModeResult, name: str) -> str:
    for row in mode.table:
        if row.get("name") == name and isinstance(row.get("density"), float):
            after = row.get("density_after")
            return f"{row['density']:.2%}" + (f" -> {after:.2%}" if isinstance(after, float) else "")
    return "-"
