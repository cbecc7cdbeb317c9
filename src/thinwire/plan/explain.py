"""Explain a plan as text: its groups, and the other candidates that were priced."""

from __future__ import annotations

from thinwire.plan.plan import EXACT, LOSSLESS, STOCK, Candidate, Plan

SHOWN = 12
"""Largest number of groups and candidates shown; the rest of a longer list is counted."""


def explain(plan: Plan) -> str:
    """Return a plan as text, see `Plan.explain`."""
    return "\n".join([*_head(plan), "", *_groups(plan), *_candidates(plan)]).rstrip() + "\n"


def format_seconds(seconds: float) -> str:
    """Format seconds with a unit that suits: ``1.23 s``, ``45.6 ms``, ``789 us``."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


def counted(number: int, noun: str) -> str:
    """Return a number of things.

    Example:
        >>> counted(1, "rank"), counted(8, "rank")
        ('1 rank', '8 ranks')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_bytes(size_bytes: float) -> str:
    """Format bytes with a unit that suits: ``1.2 GB``, ``4.8 MB``, ``16 kB``."""
    for scale, unit, digits in ((1e9, "GB", 2), (1e6, "MB", 1), (1e3, "kB", 0)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.{digits}f} {unit}"
    return f"{size_bytes:.0f} B"


def _head(plan: Plan) -> list[str]:
    size = format_bytes(sum(group.size_bytes for group in plan.groups))
    made = f", made {plan.created}" if plan.created else ""
    lines = [f"Plan for {plan.world_size} ranks and {len(plan.parameters)} parameters, {size} of gradients{made}"]
    stock = format_seconds(plan.other_seconds + plan.dense_seconds)
    if plan.does_nothing:
        lines.append(
            f"Do nothing: no exact way is better than stock DDP by more than 3 %,{_lossless(plan)} and no lossy one by"
            " 15 %."
            f" Predicted step: {stock}."
        )
    else:
        lines.append(
            f"Take {plan.choice or 'these groups'}. Predicted step: {format_seconds(plan.step_seconds)};"
            f" stock DDP: {stock}, {plan.speedup:.2f} times as long."
        )
        lines += _lossy(plan)
    if plan.note:
        lines.append(plan.note)
    return lines


def _lossless(plan: Plan) -> str:
    prefix = f"{EXACT}, {LOSSLESS}"
    return " no lossless sum by 10 %," if any(entry.name.startswith(prefix) for entry in plan.candidates) else ""


def _lossy(plan: Plan) -> list[str]:
    """Return a warning if the plan is lossy; its candidates are sorted."""
    if not any(group.compressor for group in plan.groups):
        return []
    exact = next((entry for entry in plan.candidates if entry.name == STOCK or entry.name.startswith(EXACT)), None)
    best = "" if exact is None else f" The best exact way is {exact.name}: {_step(plan, exact)}."
    return [f"It is lossy: compare the loss, too.{best}"]


def _step(plan: Plan, candidate: Candidate) -> str:
    return format_seconds(plan.other_seconds + candidate.seconds)


def _groups(plan: Plan) -> list[str]:
    lines = [f"{'group':>5}  {'parameters':>10}  {'gradients':>9}  what happens"]
    for number, group in enumerate(plan.groups[:SHOWN], start=1):
        size = format_bytes(group.size_bytes)
        lines.append(f"{number:>5}  {len(group.parameters):>10}  {size:>9}  {_what(plan, number - 1)}")
    if len(plan.groups) > SHOWN:
        lines.append(f"  and {len(plan.groups) - SHOWN} more")
    return lines


def _what(plan: Plan, number: int) -> str:
    group = plan.groups[number]
    behind = "" if plan.ahead or group.compressor is None else ", as one tensor"
    first, last = group.parameters[0], group.parameters[-1]
    span = first if first == last else f"{first} .. {last}"
    joins = ", with the group before" if group.joins else ""
    return f"{group.describe()}{behind}{joins}: {span}"


def _candidates(plan: Plan) -> list[str]:
    if not plan.candidates:
        return []
    lines = ["", f"{'seconds':>9}  candidates, from the start of backward until the last gradient is there"]
    for candidate in plan.candidates[:SHOWN]:
        mark = "  <- taken" if candidate.name == plan.choice else ""
        lines.append(f"{format_seconds(candidate.seconds):>9}  {candidate.name}{mark}")
    if len(plan.candidates) > SHOWN:
        lines.append(f"  and {len(plan.candidates) - SHOWN} slower ones")
    return lines
