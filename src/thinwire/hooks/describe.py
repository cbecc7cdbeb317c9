"""What a synchronization is, in words: lines on which ranks must agree, and what the log says after the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from thinwire.hooks.compressed import KIND, CompressedSync
from thinwire.hooks.intent import Intent
from thinwire.observe.ledger import ParameterRecord
from thinwire.sync.scheme import Scheme
from thinwire.sync.two_level import TwoLevel


def configuration(
    scheme: str | Scheme | TwoLevel,
    module: nn.Module,
    with_buffers: bool,
    compressed: CompressedSync | None,
    intent: Intent | None,
) -> str:
    """Equal on ranks that can work together."""
    lines = [f"scheme={scheme if isinstance(scheme, str) else scheme.describe()}"]
    for name, parameter in module.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        lines.append(f"parameter {name!r}: {parameter.dtype} {list(parameter.shape)}{frozen}")
    if with_buffers:
        lines += [f"buffer {name!r}: {buffer.dtype} {list(buffer.shape)}" for name, buffer in module.named_buffers()]
    if compressed is not None:
        lines += compressed.describe()
    if intent is not None:
        lines += intent.describe()
    return "\n".join(lines)


def first_step(
    records: Sequence[ParameterRecord], num_parameters: int, stats: Mapping[str, float], world_size: int
) -> str:
    """One line about all parameters."""
    rows = [record for record in records if record.kind not in ("all-reduce", KIND)]
    tables = "; ".join(
        f"{record.name} ({record.kind}, {record.density:.2%} dense) by {record.scheme}" for record in rows
    )
    compressed = sorted({f"{record.formats} by {record.scheme}" for record in records if record.kind == KIND})
    count = sum(record.kind == KIND for record in records)
    return (
        f"thinwire synchronizes {len(rows)} of {num_parameters} parameters as rows"
        f"{': ' + tables if rows else ''};{f' {count} compressed: ' + ', '.join(compressed) + ';' if count else ''}"
        f" the others are all-reduced. First step:"
        f" {stats['comm/bytes_sent']:,.0f} bytes sent, {stats['comm/bytes_dense']:,.0f} for a dense all-reduce"
        f" ({world_size} ranks)"
    )
