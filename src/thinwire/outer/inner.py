"""Ranks that train as one: a host's, whose gradients DDP averages, or among which FSDP2 cut the parameters.

Trainers wrap a model for all ranks: in a DDP of all of them, or in FSDP2 with replicas. An outer loop over those ranks,
or over the replicas, keeps them from averaging gradients in every step.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.groups import Group, resolve_group
from thinwire.comm.process_group import lost_peer
from thinwire.errors import PeerError
from thinwire.gradients import torch_internals as internals
from thinwire.gradients.module import is_dtensor, is_sharded, like, local_of
from thinwire.gradients.parameters import broadcast_all
from thinwire.gradients.sharded.layout import sharding_of
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
        self.number = process_group.rank()
        self.speaks = not is_alike or self.number == 0
        self.shard = 0 if is_alike else self.number  # the number of this rank's shard

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
        failed, *most = largest.tolist()
        if failure is not None:
            raise failure
        if failed:
            raise PeerError(
                f"rank {dist.get_rank()}: the round of rank {int(failed) - 1} failed, which trains together with this"
                " one; its own error says why"
            )
        return most

    def share(self, means: Sequence[Tensor]) -> None:
        """Give the means of a round to ranks that do not speak, after `wait`."""
        if self.is_alike:
            self._run(lambda: broadcast_all(means, self._group))

    def _run(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise lost_peer(error, dist.get_rank(), self._group.size()) from error


def outer_group(model: nn.Module, chosen: Group) -> dist.ProcessGroup:
    """Return the ranks that train apart: those chosen; else the replicas of an FSDP2 model; else all ranks."""
    sharding = sharding_of(model) if chosen is None else None
    return (None if sharding is None else sharding.replicas) or resolve_group(chosen)


def train_apart(model: nn.Module, outer: dist.ProcessGroup | Members) -> Callable[[], None]:
    """Keep DDP or FSDP2 from averaging gradients over the ranks of an outer loop; return what undoes that."""
    undo = ExitStack()
    if isinstance(model, DistributedDataParallel) and ranks_of(resolve_group(model.process_group)) == ranks_of(outer):
        undo.callback(internals.without_synchronization(model))
    elif (sharding := sharding_of(model)) is not None and sharding.replicas is not None:
        for unit in sharding.units:
            undo.callback(internals.without_replicas(unit.group))
    return undo.close


def ranks_of(outer: dist.ProcessGroup | Members) -> frozenset[int]:
    """Return the ranks of an outer loop; of `Members` all of this job, as each trains alone."""
    of_job = range(dist.get_world_size() if dist.is_initialized() else 0)
    return frozenset(of_job if isinstance(outer, Members) else dist.get_process_group_ranks(outer))


def inner_group(
    model: nn.Module, outer: dist.ProcessGroup | Members, named: Mapping[str, Tensor], recipe: OuterRecipe
) -> InnerGroup | None:
    """Return the ranks that train as one with this one, or None if it trains alone.

    Args:
        outer: the ranks of an outer loop.
        named: the parameters that are averaged, by name.

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
        if ranks_of(group) == ranks_of(outer):
            if model.static_graph:
                raise ValueError("DDP averages gradients in its first step with static_graph=True: leave that out")
            return None
    elif (sharding := sharding_of(model)) is not None:
        if sharding.replicas is not None and ranks_of(sharding.replicas) != ranks_of(outer):
            raise ValueError("an outer loop of FSDP2 with replicas is one over the replicas: leave out process_group=")
        alone = next((name for name, one in named.items() if one.requires_grad and not is_dtensor(one)), None)
        if alone is not None:
            raise ValueError(
                f"FSDP ignores parameter {alone!r}, so that the ranks of a host would train it apart: leave out"
                " ignored_params= (FSDP takes tables with sparse=False), use DDP inside of a host, or pass exclude="
            )
        if not hasattr(sharding.units[0].group.mesh_info, "shard_process_group"):
            raise ValueError("replicate() is DDP by FSDP2: take DistributedDataParallel under an outer loop")
        if sharding.shards is None:
            return None
        group, is_alike = sharding.shards, False
    else:
        return None
    both = ranks_of(group) & ranks_of(outer)
    if len(both) > 1:
        raise ValueError(
            f"ranks {sorted(both)} average gradients in every step, and an outer loop would average their parameters"
            " again: leave out process_group=; or call fully_shard(model, mesh=mesh['host']), or build"
            f" DistributedDataParallel(module, process_group=mesh.get_group('host')), with {MESH}"
        )
    if group.size() == 1:
        return None
    asked = "shadow_sync" if recipe.in_background else "" if recipe.min_ranks is None else "min_ranks="
    if asked:
        raise ValueError(
            f"{asked} is for ranks that train alone, and these train as one with others by DDP or FSDP2: take"
            " thinwire.outer.diloco or local_sgd without min_ranks=, or attach a plain module"
        )
    return InnerGroup(group, is_alike, next(iter(named.values())).device)


def local_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer, with this rank's parts of what FSDP2 has in shards."""
    state = optimizer.state_dict()
    parts = {key: {name: local_of(value) for name, value in own.items()} for key, own in state["state"].items()}
    return {**state, "state": parts}


def load_local_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore what `local_state` returned.

    Raises:
        ValueError: the optimizer has other groups of parameters.
    """
    optimizer.load_state_dict(state)
    for parameter, own in optimizer.state.items():
        for name, value in own.items():
            if isinstance(value, Tensor) and value.shape == local_of(parameter).shape:
                own[name] = like(parameter, value)


def reshard(model: nn.Module) -> None:
    """Have FSDP2 gather parameters again where it holds them whole, after they were written to."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]
