"""A training whose every step is known to the bit, run by real processes with a real Checkpointer, and restarted."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoint_faults.clock import jump
from checkpoint_faults.hosts import SECRET
from checkpoint_faults.kind import Outcome, WrongRestore
from injected import Faults
from thinwire.checkpoint.checkpointer import Checkpointer
from thinwire.checkpoint.holder import faultpoint
from thinwire.checkpoint.options import Storage
from thinwire.errors import ThinwireError
from thinwire.lab.testbed.launch import RankContext, preload, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork

STEPS = 5
_WIDTH = 24_000  # state of 2.9 MB: a version is sent in three pieces
_MAX_STEPS = 24
_ON_DISK = 2  # checkpoints, for the kinds that damage the newest
_TIMEOUT_SECONDS = 90.0


Digest = tuple[str, str]  # of parameters and moments, the same on all ranks; and of the generators of random numbers


@dataclass(frozen=True)
class Flip:
    """A bit of ``rank`` that flips after ``step``: of a parameter of the first layer, or of the optimizer's state of
    its weight."""

    rank: int
    step: int
    what: str
    element: int
    bit: int


@dataclass(frozen=True)
class Job:
    """One start of the training.

    Args:
        sockets: of the holder of each rank.
        flush_seconds: wait at each step, at most so long, until the replicas have it, so that every step has a version
            everywhere; 0 goes on at once.
        faults: at (rank, step), at a step's start or at a point of `thinwire.checkpoint.holder.faultpoint`; step 0 is
            everything before the first step.
        storage: of the Checkpointer.
        secrets: of the ranks, if they are not all the same.
        was: how many ranks there were before, if there were others: then what is restored is compared, and no step is
            trained.
        flip: a bit that flips; what ranks are after that is not compared, and `Told.stopped` has the error.
    """

    sockets: tuple[str, ...]
    steps: int = STEPS
    seed: int = 0
    width: int = _WIDTH
    flush_seconds: float = 5.0
    faults: Faults = field(default_factory=Faults)
    storage: dict[str, Any] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    clock_jumps: bool = False
    was: int | None = None
    flip: Flip | None = None


@dataclass(frozen=True)
class Told:
    """What a rank returns."""

    restored: int | None
    refused: str
    reached: frozenset[str]
    warned: str
    stats: dict[str, Any]
    stopped: str = ""


@dataclass
class Ran:
    """What became of a job: what the ranks returned (None: killed, or lost a rank), and the digest of every state."""

    told: list[Told | None]
    errors: list[str]
    digests: dict[tuple[int, int], Digest]


class _Training:
    """Model, optimizer and random numbers of one rank. Gradients are summed in the order of ranks."""

    def __init__(self, rank: int, seed: int, width: int) -> None:
        for set_seed in (torch.manual_seed, random.seed, np.random.seed):
            set_seed(1000 * seed + rank)
        generator_state = torch.get_rng_state()
        torch.manual_seed(seed)  # the same parameters everywhere
        self.model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 1))
        torch.set_rng_state(generator_state)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        x = torch.randn(6, 8) + random.random() + float(np.random.rand())
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, flat)
        mean = torch.stack(gathered).mean(0)
        for gradient, part in zip(gradients, mean.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        self.optimizer.step()

    def flip(self, flip: Flip) -> None:
        weight = self.model[0].weight
        moments = self.optimizer.state[weight]
        tensor = moments[flip.what] if flip.what in moments else getattr(self.model[0], flip.what)
        raw = tensor.detach().view(-1).view(torch.int32)
        raw[flip.element % len(raw)] ^= (1 << flip.bit) - (1 << 32) * (flip.bit == 31)

    def digest(self) -> Digest:
        """Of all bits that the next steps depend on."""
        states: list[Tensor] = [*self.model.state_dict().values()]
        states += [value for entry in self.optimizer.state_dict()["state"].values() for value in entry.values()]
        parameters = hashlib.sha256()
        for state in states:
            parameters.update(state.contiguous().numpy().tobytes())
        name, keys, *rest = np.random.get_state(legacy=True)
        generators = hashlib.sha256(repr((random.getstate(), name, rest)).encode())
        generators.update(np.asarray(keys).tobytes() + torch.get_rng_state().numpy().tobytes())
        return parameters.hexdigest(), generators.hexdigest()


def train(context: RankContext, job: Job) -> Told:
    """What every rank does: restore, and train to the end, with the faults that are planned for it."""
    rank, at = context.rank, 0
    reached: set[str] = set()

    def strike(point: str, owner: int, step: int) -> None:
        if point not in reached:
            context.send((point, at, None))
        reached.add(point)
        job.faults.strike(rank, at, at=point)

    context.send(("pid", os.getpid(), None))
    os.environ["THINWIRE_SECRET"] = job.secrets[rank] if job.secrets else SECRET
    os.environ.pop("LOCAL_WORLD_SIZE", None)  # or a holder would be started where there is none
    if job.clock_jumps:
        jump()
    training = _Training(rank, job.seed, job.width)
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        faultpoint.arm(strike)
        try:
            storage = Storage(**{"run_id": "run", "holder_socket": job.sockets[rank], **job.storage})
            made = Checkpointer(training.model, training.optimizer, storage=storage)
            checkpointer = stack.enter_context(made)
            first = checkpointer.restore()
        except (ValueError, ThinwireError) as error:
            return Told(None, f"{type(error).__name__}: {error}", frozenset(reached), _texts(caught), {})
        restoring = frozenset(reached)
        context.send(("state", first or 0, training.digest()))
        for step in range((first or 0) + 1, job.steps + 1):
            at = step
            job.faults.strike(rank, step)
            training.step()
            context.send(("state", step, training.digest()))
            if job.flip is not None and (rank, step) == (job.flip.rank, job.flip.step):
                training.flip(job.flip)
            try:
                checkpointer.step()
            except ThinwireError as error:
                return Told(first, "", restoring, _texts(caught), checkpointer.stats(), str(error))
            if job.flush_seconds:
                checkpointer.flush(job.flush_seconds)
            disk = job.storage.get("disk")
            if disk is not None and len(list(Path(disk.directory).glob("step-????????"))) < _ON_DISK:
                checkpointer._tier.join()  # on a busy machine a save lasted longer than all steps after it
            context.send(("step", step, None))
        return Told(first, "", restoring, _texts(caught), checkpointer.stats())


def _texts(caught: list[warnings.WarningMessage]) -> str:
    return "\n".join(str(warning.message) for warning in caught if issubclass(warning.category, UserWarning))


def _train_alone(context: RankContext, seed: int, width: int) -> list[Digest]:
    """The same training without checkpoints: the digests of steps 0, 1, 2 ..."""
    training = _Training(context.rank, seed, width)
    digests = [training.digest()]
    for _ in range(_MAX_STEPS):
        training.step()
        digests.append(training.digest())
    return digests


@cache
def _reference(world_size: int, seed: int, width: int) -> list[list[Digest]]:
    outcomes = run_ranks(_train_alone, seed, width, world_size=world_size, timeout_seconds=_TIMEOUT_SECONDS)
    return [outcome.value for outcome in outcomes]


OnPoint = Callable[[str, int, int], None]


def run(job: Job, on_point: OnPoint | None = None, network: EmulatedNetwork | None = None) -> Ran:
    """Run a job to whatever end it comes to, and compare every state that a rank was in with what it must be.

    With a ``network``, each rank is on a host of it.

    ``on_point(point, rank, step)`` is called here when a rank has done a ``step``, or comes to a point for the first
    time; and at its start, with the point ``pid`` and its process for a step. Raises WrongRestore.
    """
    for module in ("torch._dynamo", __name__):  # the optimizer imports the former: 0.6 s in each rank
        preload(module)
    world_size = len(job.sockets)
    ran = Ran([], [], {})

    def on_message(rank: int, message: tuple[str, int, Digest | None]) -> None:
        point, step, digest = message
        if digest is not None:
            ran.digests[rank, step] = digest
        elif on_point is not None:
            on_point(point, rank, step)

    outcomes = run_ranks(
        train,
        job,
        world_size=world_size,
        network=network,
        timeout_seconds=_TIMEOUT_SECONDS,
        check=False,
        on_message=on_message,
    )
    ran.told = [outcome.value for outcome in outcomes]
    ran.errors = [outcome.error or "" for outcome in outcomes]
    for (rank, step), digest in ran.digests.items():
        was = job.was or world_size
        if job.flip is not None and step > job.flip.step:
            continue
        parameters, generators = _reference(was, job.seed, job.width)[rank % was][step]
        if digest[0] != parameters or (digest[1] != generators and rank < was):
            raise WrongRestore(f"rank {rank} is in another state at step {step} than it was without faults")
    return ran


def restart(job: Job, on_point: OnPoint | None = None, network: EmulatedNetwork | None = None) -> Outcome:
    """Run a job, and say how its restore ended. Raises WrongRestore, also for ranks at different steps."""
    ran = run(job, on_point, network)
    told = [rank for rank in ran.told if rank is not None]
    if len(told) < len(job.sockets):
        raise RuntimeError(f"a rank died: {'; '.join(error.strip().splitlines()[-1] for error in ran.errors if error)}")
    if len({(rank.restored, bool(rank.refused)) for rank in told}) > 1:
        raise WrongRestore(f"ranks restored {[rank.refused or rank.restored for rank in told]}")
    if told[0].refused:
        return Outcome("refused", says=told[0].refused)
    if told[0].restored is None:
        return Outcome("fresh", says=told[0].warned)
    reached = frozenset[str]().union(*(rank.reached for rank in told))
    source = "disk" if "disk" in reached else "peer" if "fetch" in reached else "memory"
    return Outcome("restored", source, told[0].restored)
