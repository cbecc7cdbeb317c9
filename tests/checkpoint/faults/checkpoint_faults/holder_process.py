"""A holder's process with faults planned, run by path: ``python -P holder_process.py OPTIONS PLAN``, both as JSON.

The plan: ``faults`` (of `injected`; the rank is the owner of a shard, the point one of
`thinwire.checkpoint.holder.faultpoint`), ``file_limit_bytes`` (of any file, shared memory included), ``clock_jumps``.
It ends when its standard input does, so that it never outlives whoever started it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any


def main(options: dict[str, Any], plan: dict[str, Any]) -> int:
    threading.Thread(target=_end_with_input, daemon=True).start()
    from checkpoint_faults.clock import jump
    from injected import Fault, Faults
    from thinwire.checkpoint.holder import daemon, faultpoint

    faults = Faults(tuple(Fault(**fault) for fault in plan.get("faults", [])))
    faultpoint.arm(lambda point, owner, step: faults.strike(owner, step, at=point))
    if plan.get("file_limit_bytes") is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan["file_limit_bytes"],) * 2)
    if plan.get("clock_jumps"):
        jump()
    return daemon.main(options)


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    faults, _, tests, root = Path(__file__).resolve().parents[1:5]
    sys.path[:0] = [str(root / "src"), str(tests / "common"), str(faults)]
    code = main(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(code)
