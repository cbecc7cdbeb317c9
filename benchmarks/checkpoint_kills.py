"""A campaign of random kills: of trainers, holders and hosts, during training, restore and replacement.

    python benchmarks/checkpoint_kills.py 50 --seed 101 [--json out.json]

Every restart is compared with a training that nobody disturbed, to the bit, on every rank and at every step. A training
is killed again and again until it is done; then the next one begins, of another size and on other hosts. Whatever is
drawn follows from the seed, but not the moment of a kill in the work of others. Ends with status 1 after a wrong
restore.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Storage
from thinwire.checkpoint.holder.client import DEFAULT_LAYOUT_BYTES
from thinwire.checkpoint.holder.slots import SlotSize
from thinwire.checkpoint.registration import room_bytes
from thinwire.checkpoint.state.encode import flatten
from thinwire.lab.bench.checkpoint.hosts import HolderHosts
from thinwire.lab.bench.checkpoint.work import Trainer, TrainingWork
from thinwire.lab.report import environment
from thinwire.lab.testbed.launch import preload, run_ranks
from thinwire.lab.testbed.network import Link
from thinwire.lab.testbed.rank import RankContext
from thinwire.lab.testbed.supervise import is_peer_lost

KINDS = ("processes", "process", "holder", "host", "restore", "replacement")
_HOST_LOST = ("holder", "host", "replacement")
SHAPES = ((2, 300_000), (3, 60_000), (4, 1_500_000))  # hosts, bytes of state: one for each training, in turn
STEPS = 60  # of a training
_COMPUTE_SECONDS = 0.004
_MOST_STEPS = 6  # between two kills
_REPLICAS, _SLOTS = 2, 2
_RENUMBERED = 0.2  # of the restarts: every trainer comes back on another host
_RUN_SECONDS = 60.0
_RANDOM_BYTES = 64 << 10  # of a state, at most: the states of random number generators
_REPLACEMENTS = 10  # one host after the other, in the first training


@dataclass(frozen=True)
class FaultRun:
    """One start of a training; ``sockets`` are of the holder of each rank."""

    work: TrainingWork
    sockets: tuple[str, ...]
    run_id: str


@dataclass(frozen=True)
class RankMessage:
    """Message of a rank: ``what`` is "pid", "restored", "state" or "kept"."""

    what: str
    step: int
    digest: str = ""


def digest_of(trainer: Trainer) -> str:
    """Return a digest of all bits that the next steps depend on."""
    parts = {"model": trainer.training.module.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    layout, tensors = flatten({**parts, "random": torch.get_rng_state()})
    found = hashlib.blake2b(layout.to_bytes())
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def train_alone(context: RankContext, work: TrainingWork) -> list[str]:
    """Return the digests of steps 0, 1, ... of a training without checkpoints."""
    trainer = Trainer(work, None, context.rank, context.world_size)
    digests = [digest_of(trainer)]
    for _ in range(STEPS):
        trainer.step()
        digests.append(digest_of(trainer))
    return digests


def train(context: RankContext, run: FaultRun) -> int:
    """Run one rank up to the last step, unless it is killed, and send the launcher every state."""
    warnings.simplefilter("ignore")
    os.environ.pop("LOCAL_WORLD_SIZE", None)  # or a holder would be started where there is none
    context.send(RankMessage("pid", os.getpid()))
    trainer = Trainer(run.work, None, context.rank, context.world_size)
    checkpointer = Checkpointer(
        trainer.model, trainer.optimizer, synchronizer=trainer.synchronizer, policy=CheckpointPolicy(max_overhead=None),
        storage=Storage(run.run_id, _REPLICAS, holder_socket=run.sockets[context.rank]),
    )  # fmt: skip
    with checkpointer:
        first = checkpointer.restore() or 0
        context.send(RankMessage("restored", first, digest_of(trainer)))
        for step in range(first + 1, STEPS + 1):
            trainer.step()
            context.send(RankMessage("state", step, digest_of(trainer)))
            checkpointer.step()
            context.send(RankMessage("kept", int(checkpointer.stats()["checkpoint/replicated_step"])))
        checkpointer.flush(10.0)
    return STEPS


@dataclass
class Killer:
    """The launcher's side of one run: it receives what ranks send, compares it, and kills as planned.

    Args:
        kind: of `KINDS`, or "" for a run that ends by itself.
        steps: number of steps on all ranks before the kill.
        delay_seconds: after that, or after the processes have started when they die while they restore.
        lose: function that loses the memory of the victim's host, and puts an empty holder in its place.
    """

    reference: list[list[str]]
    kind: str
    victim: int
    steps: int
    delay_seconds: float
    lose: Callable[[], None]
    pids: dict[int, int] = field(default_factory=dict)
    restored: dict[int, int] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)
    kept: int = -1
    killed: bool = False
    wrong: list[str] = field(default_factory=list)

    def __call__(self, rank: int, message: RankMessage) -> None:
        if message.what == "pid":
            self.pids[rank] = message.step
            if self.kind in ("restore", "replacement") and len(self.pids) == len(self.reference):
                self._strike()
        elif message.what == "kept":
            self.kept = max(self.kept, message.step)
        else:
            (self.restored if message.what == "restored" else self.reached)[rank] = message.step
            if message.digest != self.reference[rank][message.step]:
                self.wrong.append(f"wrong: rank {rank} is in another state after step {message.step}")
        if self._is_time():
            self._strike()

    def _is_time(self) -> bool:
        if not self.kind or self.killed or len(self.reached) < len(self.reference):
            return False
        first = max(self.restored.values())
        safe = self.kept > first or self.kind not in _HOST_LOST
        return safe and min(self.reached.values()) >= min(first + self.steps, STEPS - 1)

    def _strike(self) -> None:
        time.sleep(self.delay_seconds)
        self.killed = True
        if self.kind in ("holder", "host") or (self.kind == "replacement" and self.steps % 2):
            if self.kind != "holder":
                self.kill(*self.pids)
            self.lose()
            if self.kind == "holder":
                time.sleep(self.delay_seconds)  # training goes on without it, or with the new one
        elif self.kind == "process":
            self.kill(self.victim)
            time.sleep(self.delay_seconds)
        self.kill(*self.pids)

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGKILL)


@dataclass
class FaultCampaign:
    """A campaign of ``faults`` kills. `run` returns the verdict; ``on_fault`` is called with a line for each kill."""

    faults: int
    seed: int = 0
    on_fault: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        if self.faults < 1:
            raise ValueError(f"{self.faults} faults: at least 1")
        self._draw = random.Random(self.seed)
        self._done: Counter[str] = Counter()
        self._problems: list[str] = []
        self._lost_steps: list[int] = []
        self._replaced = 0

    def run(self) -> dict[str, Any]:
        """Return ``{"environment": {...}, "faults": {kind: count}, "problems": [...], ...}``."""
        if __name__ != "__main__":
            preload(__name__)
        preload("torch._dynamo")
        started, training = time.monotonic(), 0
        while sum(self._done.values()) < self.faults:
            hosts, state_bytes = SHAPES[(training + self.seed) % len(SHAPES)]
            self._train(training, hosts, TrainingWork("synthetic", state_bytes, _COMPUTE_SECONDS))
            training += 1
        problems = Counter(problem.partition(":")[0] for problem in self._problems)
        return {
            "environment": environment(),
            "seed": self.seed,
            "trainings": training,
            "faults": dict(self._done),
            "hosts_replaced": self._replaced,
            "seconds": time.monotonic() - started,
            "steps_lost_most": max(self._lost_steps, default=0),
            "verdict": {name: problems.get(name, 0) for name in ("wrong", "split", "fresh", "lost", "failed")},
            "problems": self._problems,
        }

    def _train(self, training: int, hosts: int, work: TrainingWork) -> None:
        outcomes = run_ranks(train_alone, work, world_size=hosts, timeout_seconds=_RUN_SECONDS)
        reference = [outcome.value for outcome in outcomes]
        slot = SlotSize(room_bytes(work.state_bytes + _RANDOM_BYTES), DEFAULT_LAYOUT_BYTES)
        budget = str(_REPLICAS * _SLOTS * slot.total_bytes)  # 2 m S, as documented
        with (
            tempfile.TemporaryDirectory(prefix="thinwire-faults-") as directory,
            HolderHosts(hosts, Link(None), directory, budget) as machines,
        ):
            hosts_of_ranks, kept, successive = list(range(hosts)), -1, _REPLACEMENTS if training == 0 else 0
            restarted = exposed = False  # a second host may not be lost before the first one's copies are there again
            while True:
                is_end = sum(self._done.values()) >= self.faults
                kind = "" if is_end else ("host" if successive else self._draw.choice(KINDS))
                if kind == "replacement" and exposed:
                    kind = "restore"
                if restarted and self._draw.random() < _RENUMBERED:
                    hosts_of_ranks = hosts_of_ranks[1:] + hosts_of_ranks[:1]
                killer = self._killer(kind, reference, machines, successive)
                if kind == "replacement":
                    killer.lose()  # while no trainer runs; the restart that is killed replaces it
                known = len(self._problems)
                done = self._start(killer, machines, hosts_of_ranks, work, training, kept)
                kept, restarted = max(kept, killer.kept, *killer.restored.values(), -1), True
                protected = killer.kept > max(killer.restored.values(), default=STEPS)
                exposed = kind in _HOST_LOST or (exposed and not protected)
                successive -= bool(successive)
                if kind and killer.killed:
                    self._done[kind] += 1
                    self._replaced += kind in _HOST_LOST
                if done or any(problem.startswith("failed") for problem in self._problems[known:]):
                    return

    def _killer(self, kind: str, reference: list[list[str]], machines: HolderHosts, successive: int) -> Killer:
        victim = (_REPLACEMENTS - successive) % machines.hosts if successive else self._draw.randrange(machines.hosts)

        def lose() -> None:
            machines.lose(victim)
            machines.start(victim)

        delay = self._draw.uniform(0.0, 0.25 if kind in ("restore", "replacement") else 0.04)
        return Killer(reference, kind, victim, self._draw.randint(1, _MOST_STEPS), delay, lose)

    def _start(
        self,
        killer: Killer,
        machines: HolderHosts,
        hosts_of_ranks: list[int],
        work: TrainingWork,
        training: int,
        kept: int,
    ) -> bool:
        """One start of the training, judged; whether it came to its end."""
        began = time.monotonic()
        run = FaultRun(work, tuple(machines.sockets[host] for host in hosts_of_ranks), f"faults-{training}")
        outcomes = run_ranks(
            train, run, world_size=machines.hosts, timeout_seconds=_RUN_SECONDS, check=False, on_message=killer
        )
        problems = list(killer.wrong)
        restored = set(killer.restored.values())
        if len(restored) > 1:
            problems.append(f"split: ranks restored steps {sorted(restored)}")
        if restored and kept > 0 and min(restored) == 0:
            problems.append(f"fresh: training began at step 0, and all ranks had had step {kept} everywhere")
        elif restored and min(restored) < kept:
            problems.append(f"lost: step {min(restored)} was restored, and all ranks had had step {kept} everywhere")
        errors = [outcome.error for outcome in outcomes if outcome.error and not is_peer_lost(outcome.error)]
        if errors and not killer.killed:
            problems.append(f"failed: {errors[0].strip().splitlines()[-1]}")
        number = sum(self._done.values()) + bool(killer.kind)
        where = f"fault {number} of {self.faults}, seed {self.seed}, training {training} on {machines.hosts} hosts"
        self._problems += [f"{problem} ({where}, {killer.kind or 'to the end'})" for problem in problems]
        ended = f"restored step {min(restored)}" if restored else "killed before it had restored"
        self.on_fault(f"{where}: {killer.kind or 'to the end'}, {ended}, {time.monotonic() - began:.1f} s"
                      + "".join(f"; {problem}" for problem in problems))  # fmt: skip
        if restored and killer.reached and killer.killed and killer.kept > 0:
            self._lost_steps.append(min(killer.reached.values()) - killer.kept)
        return not killer.killed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = FaultCampaign(options.kills, options.seed, lambda line: print(line, flush=True)).run()
    kinds = ", ".join(f"{times} {kind}" for kind, times in result["faults"].items())
    verdict = ", ".join(f"{times} {name}" for name, times in result["verdict"].items())
    print(
        f"{sum(result['faults'].values())} kills (seed {options.seed}; {kinds}) in {result['trainings']} trainings and"
        f" {result['seconds']:.0f} s; {result['hosts_replaced']} hosts replaced\nrestores: {verdict}"
    )
    print(*result["problems"], sep="\n")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
