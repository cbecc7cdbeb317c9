"""Choice of the checkpoint to restore, and of the supplier of each shard: a pure function of all holders' inventories.

Every rank decides from the same gathered inventories, so that no second vote is needed. A shard is named by its owner,
a rank of the stored topology, never by its location: a host that returns under other ranks still supplies its shards.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.checkpoint.holder.version import StoredStep, Version, preferred, stored_steps

MAX_REASONS = 20
OTHER_TOPOLOGY = "versions of another number of ranks, or of another model"


@dataclass(frozen=True)
class Choice:
    """The step to restore, and the attempt that wrote it; None if no step is complete.

    For each owner, ``sources`` has the address of the holder that supplies its shard, and ``versions`` the version.
    ``common``: the holders of what owners have in common, by its digest. ``certified``: whether all owners have alike
    what they should; None if there is no such thing. ``reasons``: why newer steps and other versions were not chosen.
    """

    step: int | None
    attempt: int = 0
    sources: tuple[str, ...] = ()
    versions: tuple[Version, ...] = ()
    certified: bool | None = None
    reasons: tuple[str, ...] = ()
    common: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def wanted_at(self, holder: str, placed: Collection[int]) -> list[str]:
        """Return the digests of the versions that a holder keeps, or gets: of the owners that are ``placed`` there, of
        those whose own holder fetches from it, and of what owners have in common."""
        owners = enumerate(zip(self.versions, self.sources, strict=True))
        own = [version.digest for owner, (version, source) in owners if owner in placed or source == holder]
        return own + sorted(self.common)


def choose(
    inventories: Mapping[str, Iterable[Version]],
    holders: Sequence[str],
    run_id: str,
    topology: str,
    placed: Mapping[str, Collection[int]] | None = None,
    only: int | None = None,
    compares: bool = True,
) -> Choice:
    """Return the newest step of which every owner's shard is held, of the newest attempt that has such a step.

    Steps of two attempts do not mix: after a restart from step 10, step 12 of the attempt before is another history
    than step 12 of this one. If owners do not have alike what they should (``Version.shared``), the newest step at
    which they had is chosen instead, if it is still there. The source of a shard is its owner's own host if that has a
    copy; else a holder that keeps it anyway, else the one with fewest bytes to keep for others, and one outside of the
    job last; of those the one with fewest bytes to send, and the first by name. Where copies of a shard differ, none of
    them is used.

    ``inventories`` has, by the address of each holder that answered, the versions that it has verified; only versions
    of ``run_id`` and ``topology`` (`topology_digest`) count. ``holders`` has, for each rank of the job that starts now,
    the address of its host's holder; ``placed``, for each holder, the owners whose shards it keeps from now on.
    ``only`` is the step to choose; None for any. Without ``compares``, the newest is chosen, alike or not.

    Example:
        >>> has = [Version(ShardId("run", "a1", owner), 7, 0, 100, "0123456789abcdef") for owner in (0, 1)]
        >>> choose({"a:1": has, "b:1": []}, holders=["a:1", "b:1"], run_id="run", topology="a1").sources
        ('a:1', 'a:1')
    """
    reasons = [f"holder {holder} gave no inventory" for holder in sorted(set(holders) - set(inventories))]
    fitting: dict[str, list[Version]] = {}
    left_out: Counter[str] = Counter()
    for holder, versions_there in inventories.items():
        for version in versions_there:
            if reason := _why_not(version, len(holders), run_id, topology):
                left_out[f"holder {holder} has {reason}"] += 1
            else:
                fitting.setdefault(holder, []).append(version)
    reasons += [f"{text} ({times} left out)" for text, times in sorted(left_out.items())]
    whole: list[StoredStep] = []
    passed: dict[tuple[int, int], str] = {}
    for stored in stored_steps(fitting):
        attempt, step, differing = stored.attempt, stored.step, sorted(stored.unlike)
        if only not in (None, step):
            continue
        missing = [owner for owner in range(len(holders)) if not (owner in stored.copies or owner in stored.unlike)]
        texts = [f"nobody has a copy of {_shards(missing)}"] if missing else []
        texts += [f"copies of {_shards(differing)} differ"] if differing else []
        texts += [f"nobody has what ranks had in common with {_shards(stored.lacking)}"] if stored.lacking else []
        if not texts:
            whole.append(stored)
            texts = ["parameters or optimizer states of ranks differ"] if stored.certified is False else []
        if texts:
            passed[attempt, step] = f"step {step} of attempt {attempt:x}: {', '.join(texts)}"
    if (result := preferred(whole, lambda stored: stored.certified if compares else None)) is None:
        return Choice(None, reasons=_shortened(reasons + list(passed.values())))
    reasons += [text for order, text in passed.items() if order > (result.attempt, result.step)]
    sources = _sources(result.copies, holders, placed or {})
    versions = tuple(result.copies[owner][source] for owner, source in enumerate(sources))
    named = result.step, result.attempt, sources, versions, result.certified, _shortened(reasons)
    return Choice(*named, result.common)


def _why_not(version: Version, world_size: int, run_id: str, topology: str) -> str:
    """Empty for a version that can be restored."""
    shard = version.shard
    if shard.run_id != run_id:
        return f"versions of run {shard.run_id!r}, and this is {run_id!r}"
    if shard.topology != topology:
        return OTHER_TOPOLOGY
    if shard.owner >= world_size:
        return f"shards of ranks beyond the {world_size} of this job"
    return ""


def _sources(
    copies: Mapping[int, Mapping[str, Version]], holders: Sequence[str], placed: Mapping[str, Collection[int]]
) -> tuple[str, ...]:
    """Own hosts first. Of the other shards, those that few holders have are assigned first, then the large ones."""
    sources = list(holders)
    sizes = {owner: next(iter(copies[owner].values())).payload_bytes for owner in range(len(holders))}
    elsewhere = [owner for owner, holder in enumerate(holders) if holder not in copies[owner]]
    load_bytes: Counter[str] = Counter()
    kept_bytes: Counter[str] = Counter()  # for others, beside what is placed there

    def cost(owner: int, holder: str) -> tuple[bool, int, int]:
        extra = 0 if owner in placed.get(holder, ()) else kept_bytes[holder] + sizes[owner]
        return holder not in holders, extra, load_bytes[holder]

    for owner in sorted(elsewhere, key=lambda owner: (len(copies[owner]), -sizes[owner], owner)):
        source = sources[owner] = min(sorted(copies[owner]), key=lambda holder: cost(owner, holder))
        load_bytes[source] += sizes[owner]
        kept_bytes[source] += 0 if owner in placed.get(source, ()) else sizes[owner]
    return tuple(sources)


def _shards(owners: list[int]) -> str:
    more = f" and {len(owners) - 8} more" if len(owners) > 8 else ""
    return f"shard {', '.join(map(str, owners[:8]))}{more}"


def _shortened(reasons: list[str]) -> tuple[str, ...]:
    """A holder full of old runs does not fill the log."""
    more = len(reasons) - MAX_REASONS
    return tuple(reasons) if more <= 0 else (*reasons[:MAX_REASONS], f"and {more} reasons more")
