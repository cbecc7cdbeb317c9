"""A rank is killed at any moment of a collective: all others raise one sentence that names it.

They do so within two seconds; the limit here is longer, because the machine of a test may have other things to do.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from thinwire import backend
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks
LIMIT_SECONDS = 10.0


def _steps() -> dict[str, Callable[[], object]]:
    """What ranks repeat, by name."""
    world_size = dist.get_world_size()
    whole, part = torch.ones(world_size * 40_000), torch.ones(40_000)
    rows = torch.sparse_coo_tensor(torch.arange(50)[None], torch.ones(50, 8), (5000, 8))

    def several() -> None:
        for work in [dist.all_reduce(part.clone(), async_op=True) for _ in range(4)]:
            assert work is not None
            work.wait()

    return {
        "broadcast": lambda: dist.broadcast(whole, 0),
        "broadcast of the last rank": lambda: dist.broadcast(whole, world_size - 1),
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_reduce of rows": lambda: dist.all_reduce(rows),
        "functional": lambda: funcol.all_reduce(whole, "sum", list(range(world_size))).sum(),
        "several": several,
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
    }


def _is_killed(context: RankContext, kind: str, victim: int, after: float, directory: str) -> tuple[str, str, float]:
    settings = backend.Options(dense="lossless", rows="zen", least_bytes=1000)
    dist.init_process_group("thinwire", pg_options=settings, timeout=timedelta(seconds=30))
    step = _steps()[kind]
    step()
    dist.barrier()
    died = Path(directory) / "died"

    def kill() -> None:
        time.sleep(after)
        died.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if context.rank == victim:
        threading.Thread(target=kill, daemon=True).start()
    try:
        while True:
            step()
    except Exception as error:
        return type(error).__name__, str(error), time.time() - float(died.read_text())


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("broadcast", 3),
        *(
            pytest.param(kind, 4, marks=pytest.mark.slow)
            for kind in (
                "broadcast of the last rank", "all_reduce", "all_reduce of rows", "functional", "several",
                "reduce_scatter", "all_gather",
            )
        ),
    ],
)  # fmt: skip
def test_a_rank_that_is_killed_at_any_moment_is_named_by_all_others(kind: str, world_size: int, tmp_path: Path) -> None:
    moments = random.Random(kind)
    for number, victim in enumerate([1, 0, world_size - 1, moments.randrange(world_size)] if world_size > 3 else [2]):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = run_ranks(
            _is_killed, kind, victim, 0.3 * moments.random(), str(folder),
            world_size=world_size, init_process_group=False, check=False, timeout_seconds=60,
        )  # fmt: skip
        said = [outcome.value for rank, outcome in enumerate(found) if rank != victim]
        assert {name for name, *_ in said} == {"LostPeerError"}, said
        assert len({text for _, text, _ in said}) == 1, said
        assert said[0][1].startswith(f"rank {victim} "), said
        assert max(seconds for *_, seconds in said) < LIMIT_SECONDS, said
