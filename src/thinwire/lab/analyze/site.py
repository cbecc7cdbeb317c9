"""The line of a script that builds its DistributedDataParallel, so that advice can name the script's own variables."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from thinwire.plan.measurement import DdpSite

_CAPS = ("bucket_cap_mb", "bucket_cap_mb_list")
_OURS = str(Path(__file__).parent)


def find_site() -> DdpSite:
    """Return the line that is building a DDP model now: the first caller outside of this folder."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return DdpSite()
    site = DdpSite(file=frame.f_code.co_filename, line=frame.f_lineno)
    try:
        tree = ast.parse(Path(site.file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return site
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.lineno <= site.line <= (node.end_lineno or 0):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            call = node.value
            if len(targets) == 1 and isinstance(call, ast.Call) and _is_ddp(_value(call.func, frame)):
                return DdpSite((), site.file, node.lineno, ast.unparse(targets[0]), ast.unparse(call), _grouped(call))
    return site


def follows_plans(model: DistributedDataParallel) -> bool:
    """Return whether the buckets of such a model can be made the jobs of a plan."""
    has_caps = "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters
    return has_caps and (not model.find_unused_parameters or bool(model.static_graph))


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
