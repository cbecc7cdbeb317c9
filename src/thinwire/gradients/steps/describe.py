"""Descriptions of a synchronization: lines on which ranks must agree, and the log line of the first step."""

from collections.abc import Container, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.gradients.compressed import KIND, CompressedSync
from thinwire.gradients.module import local_of, synchronized_buffers, synchronized_parameters
from thinwire.gradients.steps.grouping import Intent
from thinwire.observe.step import ParameterRecord
from thinwire.sums.scheme import Scheme
from thinwire.sums.two_level import TwoLevel


def configuration(
    scheme: str | Scheme | TwoLevel,
    model: nn.Module,
    excluded: Container[str],
    compressed: CompressedSync | None = None,
    intent: Intent | None = None,
) -> str:
    """Return a description of the synchronization, which is equal on ranks that can work together."""
    lines = [f"rows={scheme if isinstance(scheme, str) else scheme.describe()}"]
    tables = [module for module in model.modules() if getattr(module, "sparse", False) is True]
    sparse = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
    for name, parameter in synchronized_parameters(model, excluded):
        more = ("" if parameter.requires_grad else ", frozen") + (", sparse" if id(parameter) in sparse else "")
        lines.append(f"parameter {name!r}: {parameter.dtype} {list(local_of(parameter).shape)}{more}")
    if not isinstance(model, DistributedDataParallel):
        lines += [
            f"buffer {name!r}: {buffer.dtype} {list(buffer.shape)}"
            for name, buffer in synchronized_buffers(model, excluded)
        ]
    if compressed is not None:
        lines += compressed.describe()
    if intent is not None:
        lines += intent.describe()
    return "\n".join(lines)


def first_step(records: Sequence[ParameterRecord], num_parameters: int, bytes_sent: int, world_size: int) -> str:
    """Return one log line about all parameters."""
    rows = [record for record in records if record.kind not in ("all-reduce", "reduce-scatter", KIND)]
    tables = "; ".join(
        f"{record.name} ({record.kind}, {record.density:.2%} dense) by {record.scheme}" for record in rows
    )
    compressed = sorted({f"{record.formats} by {record.scheme}" for record in records if record.kind == KIND})
    count = sum(record.kind == KIND for record in records)
    return (
        f"thinwire synchronizes {len(rows)} of {num_parameters} parameters as rows"
        f"{': ' + tables if rows else ''};{f' {count} compressed: ' + ', '.join(compressed) + ';' if count else ''}"
        f" the others are all-reduced. First step:"
        f" {bytes_sent:,} bytes sent, {sum(record.total_dense_bytes for record in records):,.0f} by stock DDP"
        f" ({world_size} ranks)"
    )
