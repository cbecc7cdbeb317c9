"""Settings of `thinwire bench checkpoint`, checked before anything is started."""

from dataclasses import dataclass

from thinwire.checkpoint.holder.store import available_bytes
from thinwire.checkpoint.placement import ring_sizes
from thinwire.lab.bench.checkpoint.methods import IN_PEERS, METHODS, NONE, RIVALS
from thinwire.lab.bench.checkpoint.work import SYNTHETIC, TrainingWork
from thinwire.lab.testbed.network import Link

SLOTS = 2  # of each shard, on each host that holds it


@dataclass(frozen=True)
class CheckpointBenchmark:
    """Settings of the benchmark.

    Args:
        steps: iterations of a block; each method has a block in each of ``repeat`` turns.
        replicas: copies of each host's state, including its own.
        kills: number of times all trainers of a method are killed before a host is lost too; 0 skips recovery.
        compress: that of the Checkpointers, ``thinwire`` and ``blocking``.
        traced: whether to sample the traffic of the links too, for a picture.

    Raises:
        ValueError: an unknown method or job, fewer hosts than replicas, numbers below one, or more state than there is
            memory for.
    """

    work: TrainingWork = TrainingWork()  # noqa: RUF009  # frozen
    methods: tuple[str, ...] = METHODS
    hosts: int = 8
    link: Link = Link(None)  # noqa: RUF009  # frozen
    steps: int = 20
    repeat: int = 10
    replicas: int = 2
    kills: int = 2
    compress: str | None = None
    traced: bool = False
    timeout_seconds: float = 7200.0

    def __post_init__(self) -> None:
        legal = (*METHODS, *RIVALS)
        unknown = [method for method in self.methods if method not in legal]
        if unknown or not self.methods:
            raise ValueError(f"unknown methods {', '.join(unknown) or '(none)'}; legal are {', '.join(legal)}")
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods {', '.join(self.methods)}: name each once")
        if min(self.steps, self.repeat) < 1 or self.kills < 0:
            raise ValueError("steps and repeats must be at least one, kills at least zero")
        if self.compress not in (None, "lossless"):
            raise ValueError(f"compress {self.compress!r}: it is 'lossless' or none")
        ring_sizes(self.hosts, self.replicas)
        in_peers = sum(method in IN_PEERS for method in self.methods)
        needed = in_peers * self.hosts * self.replicas * SLOTS * self.work.state_bytes
        if self.work.job == SYNTHETIC and needed > available_bytes():
            raise ValueError(
                f"{self.hosts} hosts, {self.replicas} replicas and {in_peers} methods that keep {SLOTS} versions need"
                f" {needed:,} bytes, and {available_bytes():,} are available: make the state smaller"
            )

    @property
    def recovering(self) -> list[str]:
        """Methods whose trainings are killed."""
        return [method for method in self.methods if method != NONE] if self.kills else []

    @property
    def parts(self) -> int:
        """Number of progress reports."""
        return len(self.methods) * (self.repeat + 1) + len(self.recovering) * (self.kills + 2)
