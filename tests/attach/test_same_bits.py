"""Two runs of one job give the same bits again, and a resumed one those of a run that was never stopped."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.comm.lane import Lane
from thinwire.comm.machine import Machine
from thinwire.compress import leave_small
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

NUM_WORDS, WIDTH = 4000, 16
SLOW = Machine(1e-4, 1e-4, 1e-4, 1e-4, 1e-5, *[1e-8, 1e-10] * 3)
FAST = Machine(1e-5, 1e-5, 1e-12, 1e-12, 1e-5, 1e-9, 1e-10, 1e-4, 1e-8, 1e-9, 1e-10)  # where work decides
DISTANT = Machine(1e-1, 1e-1, 1e-12, 1e-12, 1e-5, *[1e-12, 1e-14] * 3)


class Network(nn.Module):
    """Dense tables, of which one is small, sparse ones, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        self.kinds = nn.Embedding(40, WIDTH)
        self.places = nn.Embedding(NUM_WORDS, WIDTH, sparse=True)
        self.days = nn.Embedding(30, WIDTH, sparse=True)
        self.zeros = nn.Embedding(500, WIDTH, sparse=True)
        self.hidden = nn.Linear(WIDTH, 70)
        self.out = nn.Linear(70, 3)

    def forward(self, words: Tensor) -> Tensor:
        rows = self.words(words) + self.kinds(words % 40) + self.places(words // 2) + self.days(words % 30)
        nothing = (self.zeros(words % 500) * -0.0).sum()  # whose gradients are negative zeros
        return self.out(self.hidden(rows).tanh()).square().mean() + nothing


def batch_of(rank: int, step: int) -> Tensor:
    """Words of which many are there twice; in some steps nearly all of the table."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    size = 40_000 if step in (5, 6) else 300
    return (torch.rand(size, generator=generator) ** 2 * NUM_WORDS).long()


@contextmanager
def as_if(machine: Machine, hosts: Callable[[int], int], rank: int, deterministic: bool = True) -> Iterator[None]:
    """Ranks on these hosts, whose links cost what the machine says."""
    os.environ["THINWIRE_HOST"] = str(hosts(rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "machine", lambda lane: machine)
        torch.use_deterministic_algorithms(deterministic)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def digest_of(model: nn.Module) -> str:
    parameters = sorted((name.removeprefix("module."), one) for name, one in model.named_parameters())
    sums = [one.grad._values() if one.grad.is_sparse else one.grad for _, one in parameters]
    data = b"".join(one.detach().numpy().tobytes() for one in [*sums, *(one for _, one in parameters)])
    return hashlib.sha256(data).hexdigest()[:16]


def made(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = wrap(Network())
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[str]:
    digests = []
    for step in steps:
        optimizer.zero_grad()
        model(batch_of(rank, step)).backward()
        optimizer.step()
        digests.append(digest_of(model))
    return digests


def _by_every_clock(context: RankContext, wrap: Callable[[nn.Module], nn.Module]) -> list[str]:
    """The bits of each step, which are those of every machine; and what was decided."""
    found, decided = [], set()
    for hosts in (lambda rank: rank, lambda rank: rank // 2):
        for machine in (SLOW, FAST, DISTANT):
            with as_if(machine, hosts, context.rank):
                model, optimizer = made(wrap)
                sync = thinwire.attach(model)
                found.append(train(model, optimizer, context.rank, range(12)))
                decided |= {str(row["scheme"]) for row in sync.table()}
                sync.detach()
    assert all(digests == found[0] for digests in found), decided
    assert len(decided - {"dense"}) > 1, decided
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap", [pytest.param(DistributedDataParallel, id="ddp"), pytest.param(nn.Module.train, id="plain")]
)
def test_no_clock_decides_about_bits_under_deterministic_algorithms(wrap: Callable[..., nn.Module]) -> None:
    first, *others = [outcome.value for outcome in run_ranks(_by_every_clock, wrap, world_size=3, timeout_seconds=90)]
    assert all(other == first for other in others)


def _goes_on(context: RankContext, wrap: Callable[[nn.Module], nn.Module], settings: dict[str, Any]) -> list[str]:
    """What was logged on the way, on rank 0; the same bits with a restart in the middle and without."""
    said: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("thinwire")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with as_if(SLOW, lambda rank: rank, context.rank, deterministic=False):  # bytes decide, not times
        model, optimizer = made(wrap)
        sync = thinwire.attach(model, **settings)
        train(model, optimizer, context.rank, range(4))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
        expected = train(model, optimizer, context.rank, range(4, 7))
        sync.detach()
        model, optimizer = made(wrap)
        sync = thinwire.attach(model, **settings)
        for part, state in zip((model, optimizer, sync), saved, strict=True):
            part.load_state_dict(state)
        assert train(model, optimizer, context.rank, range(4, 7)) == expected
        sync.detach()
    return said


@pytest.mark.parametrize(
    ("wrap", "settings"),
    [
        (nn.Module.train, {}),
        pytest.param(DistributedDataParallel, {"dense": "lossless"}, marks=pytest.mark.slow),
        pytest.param(
            DistributedDataParallel,
            {"dense": leave_small(thinwire.compress.top_k(0.05), rest="lossless")},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            DistributedDataParallel,
            {"dense": leave_small(thinwire.compress.qsgd(8), rest="lossless")},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "ddp-lossless", "ddp-top_k", "ddp-qsgd"],
)
def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    wrap: Callable[..., nn.Module], settings: dict[str, Any]
) -> None:
    """Of three ranks: of two, sums in any order have the same bits."""
    said, *_ = (outcome.value for outcome in run_ranks(_goes_on, wrap, settings, world_size=3, timeout_seconds=60))
    lines = [line for line in said if "pins" in line]
    assert any(line.startswith("words.weight: ") and line.endswith('" pins it') for line in lines), said
    assert len(set(lines)) >= len(lines) / 2, "once a run"


class Blocks(nn.Module):
    """Blocks in the order that a step has, as with alternating losses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(400, 400, bias=False) for _ in range(6))

    def forward(self, rows: Tensor, order: list[int]) -> Tensor:
        for number in order:
            rows = rows + self.blocks[number](rows).tanh()
        return rows.square().mean()


def _goes_on_in_another_order(context: RankContext) -> None:
    def run(steps: range, state: Any = None) -> tuple[Any, Tensor]:
        torch.manual_seed(0)
        model = Blocks()
        sync = thinwire.attach(model, dense="native")
        if state is not None:
            model.load_state_dict(state[0])
            sync.load_state_dict(state[1])
        for step in steps:
            model.zero_grad()
            rows = torch.randn(8, 400, generator=torch.Generator().manual_seed(100 * step + context.rank))
            model(rows, [5, 3, 1, 0, 2, 4] if step == 2 else list(range(6))).backward()
        saved = copy.deepcopy((model.state_dict(), sync.state_dict()))
        sync.detach()
        return saved, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    saved, _ = run(range(2))
    _, through = run(range(4))
    _, resumed = run(range(2, 4), saved)
    assert torch.equal(through, resumed)


def test_a_plain_module_that_resumes_in_another_order_has_the_bits_of_one_that_went_on() -> None:
    run_ranks(_goes_on_in_another_order, world_size=3, timeout_seconds=60)


FROZEN: dict[str, Any] = {
    "version": 3,
    "steps": 3,
    "parameters": ["days.weight", "hidden.bias", "hidden.weight", "kinds.weight", "out.bias", "out.weight",
                   "places.weight", "words.weight", "zeros.weight"],
    "choices": {"words.weight": "auto", "places.weight": "agsparse_coded", "days.weight": "sparcml_coded"},
    "pauses": {"words.weight": 0},
    "unions": {"words.weight": 792, "places.weight": 640, "days.weight": 30, "zeros.weight": 410},
    "auto": {
        "windows": {
            "words.weight": [(3, 4000, 16, 4, 287.0, 792.0, False), (3, 4000, 16, 4, 288.0, 795.0, False)],
            "places.weight": [(3, 4000, 16, 4, 270.0, 640.0, True), (3, 4000, 16, 4, 271.0, 652.0, True)],
        },
        "left": {"words.weight": 997, "places.weight": 0},
        "most_rows": {"words.weight": 2400.0},
        "dense_runs": {"words.weight": 0},
    },
    "compress": None,
    "plan": None,
    "dense": {"dtypes": [], "native": {}, "reason": "dense gradients are summed natively: no code could pay"},
}  # fmt: skip
"""What 0.1 saved on three ranks, before it saved what was decided about dense gradients beside their dtypes."""


def _loads(context: RankContext) -> None:
    with as_if(FAST, lambda rank: rank, context.rank, deterministic=False):
        model, optimizer = made(DistributedDataParallel)
        sync = thinwire.attach(model)
        sync.load_state_dict(copy.deepcopy(FROZEN))
        state = sync.state_dict()
        assert all(state[name] == FROZEN[name] for name in FROZEN if name not in ("auto", "dense"))
        assert FROZEN["auto"]["windows"].keys() == state["auto"]["windows"].keys()
        assert FROZEN["dense"].items() <= state["dense"].items()
        train(model, optimizer, context.rank, range(1))
        sync.detach()


def test_a_state_of_an_older_version_is_loaded() -> None:
    run_ranks(_loads, world_size=3, timeout_seconds=60)
