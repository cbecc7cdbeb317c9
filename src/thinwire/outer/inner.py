"""Ranks that train as one: those of a host, whose gradients DDP averages, or among which FSDP2 cut the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.lane import resolve_group
from thinwire.comm.process_group import lost_peer
from thinwire.errors import PeerError
from thinwire.gradients.fsdp import sharding_of
from thinwire.gradients.model import is_sharded, synchronized_parameters
from thinwire.gradients.parameters import broadcast_all
from thinwire.outer.members import Members
from thinwire.outer.recipe import OuterRecipe

MESH = (
    "mesh = init_device_mesh(device_type, (hosts, ranks_of_a_host), mesh_dim_names=('hosts', 'host')), and attach with"
    " process_group=mesh['hosts']"
)


class InnerGroup:
    """The ranks that make the same inner steps together with this one, and land each round together.

    Of ranks that have the same parameters only the first sends differences to other hosts, so that bytes between hosts
    do not multiply. Of ranks that have shards each sends its own.

    Args:
        process_group: these ranks, as DDP or FSDP2 has them. Its timeout must be longer than a round.
        is_alike: whether they have the same parameters, and not shards.
        device: device of the parameters.
    """

    def __init__(self, process_group: dist.ProcessGroup, is_alike: bool, device: torch.device) -> None:
        self._group, self.is_alike, self._device = process_group, is_alike, device
        self.speaks = not is_alike or process_group.rank() == 0

    @property
    def shard(self) -> int:
        """The number of this rank's shard."""
        return 0 if self.is_alike else self._group.rank()

    def wait(self, wait: Callable[[], Sequence[float]], count: int) -> list[float]:
        """Wait for a round on the training thread of all these ranks: all of them go on, or none.

        Args:
            wait: waits for the round of this rank, and returns ``count`` numbers, 0 or more, to tell the others; it is
                not called on ranks that do not speak.

        Returns:
            The largest of each number.

        Raises:
            PeerError: the round of another of these ranks failed.
            LostPeerError: one of them died, or did not come within the timeout of their group.
        """
        failure: Exception | None = None
        numbers = [0.0] * (1 + count)
        try:
            numbers[1:] = wait() if self.speaks else numbers[1:]
        except Exception as error:
            failure, numbers[0] = error, 1.0 + dist.get_rank()
        largest = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        self._run(lambda: dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group))
        failed, *told = largest.tolist()
        if failure is not None:
            raise failure
        if failed:
            raise PeerError(
                f"rank {dist.get_rank()}: the round of rank {int(failed) - 1} failed, which trains together with this"
                " one; its own error says why"
            )
        return told

    def share(self, means: Sequence[Tensor]) -> None:
        """Give the means of a round to ranks that do not speak, after `wait`."""
        if self.is_alike:
            self._run(lambda: broadcast_all(means, self._group))

    def _run(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise lost_peer(error, dist.get_rank(), self._group.size()) from error


def inner_group(
    model: nn.Module, outer: dist.ProcessGroup | Members, device: torch.device, recipe: OuterRecipe
) -> InnerGroup | None:
    """Return the ranks that train as one with this one, or None if it trains alone.

    Args:
        outer: the ranks of an outer loop.
        device: device of the parameters.

    Raises:
        ValueError: both have ranks in common, a layout in which ranks would drift apart, or a recipe or members for
            ranks that train alone.
    """
    if isinstance(outer, Members):
        if isinstance(model, DistributedDataParallel) or is_sharded(model):
            raise ValueError("Members are ranks that train alone: attach the plain module, not one of DDP or FSDP2")
        return None
    if isinstance(model, DistributedDataParallel):
        group, is_alike = resolve_group(model.process_group), True
        build = (
            "build it inside of a host, DistributedDataParallel(module, process_group=mesh.get_group('host')), with"
            f" {MESH}; or attach the plain module"
        )
    elif (sharding := sharding_of(model)) is not None:
        if sharding.replicas is not None:
            raise ValueError(
                f"outer= takes FSDP models without replicas: call fully_shard(model, mesh=mesh['host']) with {MESH}"
            )
        alone = next((name for name, entry in synchronized_parameters(model) if entry.requires_grad), None)
        if alone is not None:
            raise ValueError(
                f"FSDP ignores parameter {alone!r}, so that the ranks of a host would train it apart: leave out"
                " ignored_params= (FSDP takes tables with sparse=False), or use DDP inside of a host"
            )
        group, is_alike = sharding.group(), False
        build = f"call fully_shard(model, mesh=mesh['host']) with {MESH}"
    else:
        return None
    both = set(dist.get_process_group_ranks(group)).intersection(dist.get_process_group_ranks(outer))
    if len(both) > 1:
        raise ValueError(
            f"ranks {sorted(both)} average gradients in every step, and outer= would average their parameters again:"
            f" {build}"
        )
    if group.size() == 1:
        return None
    asked = "shadow_sync" if recipe.in_background else "" if recipe.min_ranks is None else "min_ranks="
    if asked:
        raise ValueError(
            f"{asked} is for ranks that train alone, and these train as one with others by DDP or FSDP2: take"
            " thinwire.outer.diloco or local_sgd without min_ranks=, or attach a plain module"
        )
    return InnerGroup(group, is_alike, device)


def reshard(model: nn.Module) -> None:
    """Have FSDP2 gather parameters anew where it holds them whole, after they were written to."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]
