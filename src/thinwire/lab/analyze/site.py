"""The lines of a script that build its DDP model, which advice names, and others that a message names."""

import ast
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab.planning.measurement import DdpSite

_CAPS = ("bucket_cap_mb", "bucket_cap_mb_list")
_PACKAGE = str(Path(thinwire.__file__).parent)
_OURS = str(Path(__file__).parent)
_LONGEST = 60


def find_site() -> DdpSite:
    """Return the statement that is building a DDP model now, in the first caller outside of this folder.

    Of a function that returns the model, the statement that calls it: lines after a ``return`` are never run.
    """
    frame: FrameType | None = _caller(_OURS)
    inner_line = 0
    while frame is not None:
        statement = _statement(frame)
        if statement is None:
            break
        if not isinstance(statement, ast.Return):
            return _site(statement, frame, inner_line)
        inner_line = inner_line or frame.f_lineno
        frame = frame.f_back
    return DdpSite() if frame is None else DdpSite(file=frame.f_code.co_filename, line=frame.f_lineno)


def _site(statement: ast.stmt, frame: FrameType, inner_line: int) -> DdpSite:
    site = DdpSite(
        file=frame.f_code.co_filename,
        line=statement.lineno,
        last_line=statement.end_lineno or statement.lineno,
        inner_line=inner_line,
    )
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or not isinstance(statement.value, ast.Call):
        return site
    targets, call = statement.targets if isinstance(statement, ast.Assign) else [statement.target], statement.value
    is_model = bool(inner_line) or _is_ddp(_value(call.func, frame))
    if not is_model or len(targets) != 1 or isinstance(targets[0], (ast.Tuple, ast.List)):
        return site
    return replace(
        site,
        target=ast.unparse(targets[0]),
        call=ast.unparse(call),
        grouped_call=ast.unparse(call) if inner_line else _grouped(call),
    )


def calling_line() -> str:
    """Describe the statement that is calling thinwire or torch now, by line and text."""
    frame = _caller(_PACKAGE)
    if frame is None:
        return "a line of the script"
    statement = _statement(frame)
    where = f"line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}"
    if statement is None:
        return where
    text = ast.unparse(statement)
    return f"{where}, `{text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}`"


def is_called_by_us() -> bool:
    """Return whether the caller of the calling function is code of this package."""
    return sys._getframe(2).f_code.co_filename.startswith(_PACKAGE)


def follows_plans(model: DistributedDataParallel) -> bool:
    """Return whether the buckets of such a model can be made the jobs of a plan."""
    return not model.find_unused_parameters or bool(model.static_graph)


def _caller(folder: str) -> FrameType | None:
    """Return the first caller outside of a folder."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    return frame


def _statement(frame: FrameType) -> ast.stmt | None:
    """Return the simple statement that a frame is running, or None if its source is not known."""
    try:
        tree = ast.parse(Path(frame.f_code.co_filename).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    *_, column, _ = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))

    def holds(node: ast.stmt) -> bool:
        first, last = (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)
        if column is None:  # of Python without columns, as with PYTHONNODEBUGRANGES
            return first[0] <= frame.f_lineno <= last[0]
        return first <= (frame.f_lineno, column) < last

    around = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and not hasattr(n, "body") and holds(n)]
    return min(around, key=lambda node: (node.end_lineno or node.lineno) - node.lineno, default=None)


def _is_ddp(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, DistributedDataParallel)


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of a dotted name in a frame, or None."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    return getattr(_value(node.value, frame), node.attr, None) if isinstance(node, ast.Attribute) else None


def _grouped(call: ast.Call) -> str:
    """Return the call with the buckets of a plan."""
    plan = ast.parse("plan.bucket_cap_mb_list()", mode="eval").body
    kept = [keyword for keyword in call.keywords if keyword.arg not in _CAPS]
    return ast.unparse(ast.Call(call.func, call.args, [*kept, ast.keyword("bucket_cap_mb_list", plan)]))
