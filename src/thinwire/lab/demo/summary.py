"""The comparison in words and table rows, for the terminal and for the report."""

import math
from collections.abc import Sequence

from thinwire.lab.demo.compare import Comparison
from thinwire.lab.demo.train import VARIANTS

ALIKE = 0.05
"""Share by which step times may differ and still count as equal: medians of two runs differ by up to 4 %."""
HEADLINE_MBIT = 1000.0
NEXT = "Your model: thinwire doctor train.py"
_PAIRS = (("ddp", "thinwire"), ("ddp_sparse", "thinwire_sparse"))
_LABELS = {variant.name: variant.label for variant in VARIANTS}


def format_bytes(value: float) -> str:
    """Format a number of bytes: ``format_bytes(4_831_080) == '4.83 MB'`` (decimal units)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def format_seconds(value: float) -> str:
    """Format a time: ``format_seconds(0.1234) == '123 ms'``."""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def format_link(link_mbit: float | None) -> str:
    """Format a measured link: ``format_link(955.4) == '955 Mbit/s'``."""
    return "loopback" if link_mbit is None else f"{link_mbit:,.0f} Mbit/s"


def format_factor(value: float) -> str:
    """Format a ratio of step times: ``format_factor(4.83) == '4.8x'`` and ``format_factor(1.234) == '1.23x'``."""
    return f"{value:.1f}x" if value >= 2 else f"{value:.2f}x"


def headline(comparisons: Sequence[Comparison]) -> Comparison:
    """Return the comparison whose link is nearest to 1 Gbit/s, the default of the demo."""
    return min(comparisons, key=lambda one: abs(math.log((one.link_mbit or HEADLINE_MBIT) / HEADLINE_MBIT)))


def conditions(comparison: Comparison) -> str:
    """Return hosts, link, model and steps in one line."""
    link = comparison.link_mbit
    where = (
        f"{comparison.hosts} ranks on the loopback of one machine"
        if link is None
        else f"{comparison.hosts} emulated hosts, links of {format_link(link)} measured"
    )
    return (
        f"{where}; LSTM language model, two tables of {comparison.config.num_rows:,} rows of"
        f" {comparison.config.embedding_dim}, Adagrad; {comparison.steps} steps of each in turn, medians of the last"
        f" {comparison.measured_steps}"
    )


def _compared(speedup: float) -> str:
    """Return ``1.5x faster``, ``1.5x slower``, or nothing where both are alike."""
    if speedup > 1 + ALIKE:
        return f"{format_factor(speedup)} faster"
    return f"{format_factor(1 / speedup)} slower" if speedup < 1 - ALIKE else ""


def result(comparison: Comparison) -> str:
    """Return the result in one sentence."""
    speed = _compared(comparison.speedup("ddp", "thinwire"))
    how = f"{speed} than this model under DDP" if speed else "As fast as this model under DDP"
    losses = "with the same losses" if comparison.is_exact else "but the losses differ: please report this"
    where = ", on loopback, where bytes cost next to nothing" if comparison.link_mbit is None else ""
    busy = ""
    if comparison.is_busy:
        load = f"{comparison.load:.0f} other processes on {comparison.cores} cores, " if comparison.load >= 1 else ""
        low, high = map(format_seconds, comparison.results["ddp"].step_seconds_range)
        busy = f" This machine is busy ({load}steps of stock DDP of {low} to {high}): these times mean little."
    return f"{how}, by one line: thinwire.attach(model), {losses}{where}.{busy}"


def advice(comparison: Comparison) -> str:
    """Return what ``sparse=True`` gives, with and without thinwire."""
    sparse = comparison.results["ddp_sparse"].step_seconds
    speed = _compared(comparison.speedup("ddp_sparse", "thinwire_sparse"))
    then = f"is {speed} than that" if speed else "is as fast"
    if sparse > comparison.results["thinwire"].step_seconds:
        return f"With sparse=True, stock DDP takes {format_seconds(sparse)} a step, and thinwire {then}."
    return (
        f"If you can switch to sparse=True, do that first: stock DDP then takes {format_seconds(sparse)} a step, and"
        f" thinwire {then}."
    )


def exactness(comparison: Comparison) -> str:
    """Return how far the variants are apart."""
    equal = "bitwise equal" if comparison.parameters_bitwise_equal else "NOT equal"
    return (
        f"Losses of the four differ by at most {comparison.loss_difference:.1e} (relative); parameters are {equal} on"
        " all ranks."
    )


COLUMNS = ("", "step", "p10 to p90", "sent per step", "last loss")


def rows(comparison: Comparison) -> list[list[str]]:
    """Return a row for each variant, of the cells that `COLUMNS` names."""
    return [
        [
            one.variant.label,
            format_seconds(one.step_seconds),
            " to ".join(map(format_seconds, one.step_seconds_range)),
            format_bytes(one.bytes_per_step),
            f"{one.loss[-1]:.6f}",
        ]
        for one in comparison.results.values()
    ]


def link_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return the step of each variant on each link, and what thinwire gains."""
    times = [
        [label, *(format_seconds(one.results[name].step_seconds) for one in comparisons)]
        for name, label in _LABELS.items()
    ]
    gains = [
        [f"{_LABELS[of]}: speed-up", *(format_factor(one.speedup(over, of)) for one in comparisons)]
        for over, of in _PAIRS
    ]
    return times + gains


def losing_points(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a sentence for each link on which thinwire is slower than stock DDP, or one that there is none."""
    sentences = [
        f"At {format_link(one.link_mbit)}, {_LABELS[of]} is {format_factor(1 / one.speedup(over, of))} slower than"
        f" {_LABELS[over]}."
        for one in comparisons
        for over, of in _PAIRS
        if one.speedup(over, of) < 1 - ALIKE
    ]
    return sentences or [f"On none of these links is thinwire slower than stock DDP by more than {ALIKE:.0%}."]
