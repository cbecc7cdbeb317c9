"""The version that all ranks go back to: complete, of one history, from the nearest copy, and the same for everyone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from math import comb
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from holders import survives
from thinwire.checkpoint.choice import MAX_REASONS, choose
from thinwire.checkpoint.holder.version import ShardId, Version, next_attempt, preferred
from thinwire.checkpoint.placement import placement, recovery_probability
from thinwire.checkpoint.restore import Restorer
from thinwire.checkpoint.state.snapshot import TrainingState

Inventories = dict[str, list[Version]]


def copy(
    owner: int,
    step: int,
    attempt: int = 0,
    payload_bytes: int = 100,
    digest: str = "",
    run_id: str = "run",
    topology: str = "a1",
) -> Version:
    digest = digest or f"{owner}-{step}-{attempt}".ljust(16, "0")
    return Version(ShardId(run_id, topology, owner), step, attempt, payload_bytes, digest)


def held(machines: int, replicas: int, steps: list[int]) -> Inventories:
    """What the holders have after these steps, one rank a machine."""
    inventories: Inventories = {f"h{machine}": [] for machine in range(machines)}
    for owner, hosts in enumerate(placement(machines, replicas)):
        for host in hosts:
            inventories[f"h{host}"].extend(copy(owner, step) for step in steps)
    return inventories


def hosts_of(machines: int) -> list[str]:
    return [f"h{machine}" for machine in range(machines)]


def test_all_processes_died() -> None:
    """Machines are alive: everything is local, of the newest step."""
    chosen = choose(held(5, 2, [6, 7]), hosts_of(5), "run", "a1")
    assert (chosen.step, chosen.attempt, chosen.reasons) == (7, 0, ())
    assert chosen.sources == tuple(hosts_of(5))
    assert [version.shard.owner for version in chosen.versions] == [0, 1, 2, 3, 4]


def test_a_machine_was_replaced() -> None:
    inventories = held(5, 2, [6, 7])
    del inventories["h3"]
    chosen = choose(inventories | {"new": []}, ["h0", "h1", "h2", "new", "h4"], "run", "a1")
    assert (chosen.step, chosen.sources) == (7, ("h0", "h1", "h2", "h4", "h4")), "placement(5, 2)[3] is (3, 4)"


@given(st.data(), st.integers(2, 9), st.integers(1, 4))
def test_a_step_is_found_when_every_shard_survives(data: st.DataObject, machines: int, replicas: int) -> None:
    """And only then: the choice and the placement agree on what can be lost."""
    replicas = min(replicas, machines)
    lost = data.draw(st.sets(st.integers(0, machines - 1)))
    inventories = {name: has for name, has in held(machines, replicas, [4]).items() if int(name[1:]) not in lost}
    chosen = choose(inventories | {f"h{machine}": [] for machine in lost}, hosts_of(machines), "run", "a1")
    if not survives(placement(machines, replicas), lost):
        assert chosen.step is None
        assert chosen.reasons or len(lost) == machines
        return
    fetched = {owner for owner, source in enumerate(chosen.sources) if source != f"h{owner}"}
    assert (chosen.step, fetched) == (4, lost)
    for owner, source in enumerate(chosen.sources):
        assert chosen.versions[owner] == copy(owner, 4)
        assert chosen.versions[owner] in inventories[source]


@pytest.mark.parametrize(("machines", "replicas"), [(n, m) for n in range(2, 10) for m in (2, 3) if m <= n])
def test_every_set_of_machines_that_can_be_lost(machines: int, replicas: int) -> None:
    """Restored exactly when every owner has a copy left: as often as `recovery_probability` says."""
    holders, inventories = placement(machines, replicas), held(machines, replicas, [4])
    for failed in range(machines + 1):
        restored = 0
        for lost in combinations(range(machines), failed):
            left = {name: [] if int(name[1:]) in lost else has for name, has in inventories.items()}
            chosen = choose(left, hosts_of(machines), "run", "a1")
            assert (chosen.step == 4) == survives(holders, lost)
            assert all(version in left[source] for version, source in zip(chosen.versions, chosen.sources, strict=True))
            restored += chosen.step == 4
        assert restored / comb(machines, failed) == recovery_probability(machines, replicas, failed)


@given(st.integers(2, 9), st.sampled_from([2, 3]), st.floats(0, 0.6), st.randoms(use_true_random=False))
def test_the_newest_step_of_which_every_shard_has_a_good_copy(
    machines: int, replicas: int, share: float, random: Random
) -> None:
    """Copies that were altered are not in an inventory, wherever they are."""
    replicas, steps = min(replicas, machines), (6, 7, 8)
    holders = placement(machines, replicas)
    copies = [(owner, host, step) for owner, hosts in enumerate(holders) for host in hosts for step in steps]
    altered = {each for each in copies if random.random() < share}
    inventories: Inventories = {name: [] for name in hosts_of(machines)}
    for owner, host, step in sorted(set(copies) - altered):
        inventories[f"h{host}"].append(copy(owner, step))
    whole = [step for step in steps if all(any(has == copy(owner, step) for host in hosts for has in
             inventories[f"h{host}"]) for owner, hosts in enumerate(holders))]  # fmt: skip
    chosen = choose(inventories, hosts_of(machines), "run", "a1")
    assert chosen.step == max(whole, default=None)
    for owner, (version, source) in enumerate(zip(chosen.versions, chosen.sources, strict=True)):
        assert version == copy(owner, chosen.step or 0)
        assert version in inventories[source]
        assert source == f"h{owner}" or version not in inventories[f"h{owner}"], "the own host goes first"


def test_two_starts_of_a_run_that_did_not_see_each_other_are_two_histories() -> None:
    """Both count as the first, and got to the same step; a host of each is there."""
    first, second = next_attempt([], 0xA), next_attempt([], 0xB)
    chosen = choose({"h0": [copy(0, 7, first)], "h1": [copy(1, 7, second)]}, hosts_of(2), "run", "a1")
    assert chosen.step is None
    assert chosen.reasons == (
        "step 7 of attempt b: nobody has a copy of shard 0",
        "step 7 of attempt a: nobody has a copy of shard 1",
    )


def test_ranks_that_come_back_in_another_order_fetch_their_shards() -> None:
    chosen = choose(held(4, 2, [7]), ["h2", "h1", "h0", "h3"], "run", "a1")
    assert chosen.step == 7
    assert chosen.sources[1:4:2] == ("h1", "h3")
    assert chosen.sources[0] in ("h0", "h1")
    assert chosen.sources[2] in ("h2", "h3")


def test_an_older_step_is_taken_if_a_shard_of_the_newest_is_nowhere() -> None:
    inventories = held(4, 2, [6, 7])
    for has in inventories.values():
        has[:] = [version for version in has if (version.shard.owner, version.step) != (2, 7)]
    chosen = choose(inventories, hosts_of(4), "run", "a1")
    assert chosen.step == 6
    assert chosen.reasons == ("step 7 of attempt 0: nobody has a copy of shard 2",)


def test_ranks_in_different_steps_meet_at_the_one_that_all_have() -> None:
    inventories = {"h0": [copy(0, 7), copy(0, 8)], "h1": [copy(1, 6), copy(1, 7)], "h2": [copy(2, 7), copy(2, 8)]}
    assert choose(inventories, hosts_of(3), "run", "a1").step == 7
    inventories["h1"] = [copy(1, 5), copy(1, 6)]
    chosen = choose(inventories, hosts_of(3), "run", "a1")
    assert chosen.step is None
    assert len(chosen.reasons) == 4, "one for each of the steps 5 to 8"


def test_steps_of_two_attempts_are_two_histories() -> None:
    """Attempt 1 went on from step 10 and trained step 12 anew; the host of rank 1 comes back with the old step 12."""
    inventories = {
        "h0": [copy(0, 11, 1), copy(0, 12, 1), copy(0, 10)],
        "h1": [copy(1, 11, 1), copy(1, 12, 0), copy(1, 10)],
    }
    chosen = choose(inventories, hosts_of(2), "run", "a1")
    assert (chosen.attempt, chosen.step) == (1, 11)
    assert chosen.reasons == ("step 12 of attempt 1: nobody has a copy of shard 1",)


def test_an_abandoned_history_is_not_resumed_for_its_higher_step() -> None:
    old, new = [copy(0, 30), copy(1, 30)], [copy(0, 11, 1), copy(1, 11, 1)]
    assert choose({"h0": old + new}, ["h0", "h0"], "run", "a1").step == 11
    assert choose({"h0": [*old, new[0]]}, ["h0", "h0"], "run", "a1").step == 30, "unless the newer has nothing complete"


@pytest.mark.parametrize(
    ("stranger", "says"),
    [
        (copy(1, 9, run_id="other"), "run 'other'"),
        (copy(1, 9, topology="ffff"), "another number of ranks, or of another model"),
        (copy(2, 9), "beyond the 2 of this job"),
    ],
)
def test_what_does_not_belong_is_left_out_and_said(stranger: Version, says: str) -> None:
    inventories = {"h0": [copy(0, 7), copy(0, 9)], "h1": [copy(1, 7), stranger, stranger]}
    chosen = choose(inventories, hosts_of(2), "run", "a1")
    assert chosen.step == 7
    assert chosen.reasons[0].startswith("holder h1 has ")
    assert says in chosen.reasons[0]
    assert "(2 left out)" in chosen.reasons[0]
    alone = choose({"h0": [stranger], "h1": [stranger]}, hosts_of(2), "run", "a1")
    assert (alone.step, alone.sources, len(alone.reasons)) == (None, (), 2)


@pytest.mark.parametrize("second", [copy(1, 8, payload_bytes=99), copy(1, 8, digest="f" * 16)])
@pytest.mark.parametrize("where", ["h0", "h1"])
def test_copies_that_differ_are_not_taken(second: Version, where: str) -> None:
    inventories = {"h0": [copy(0, 7), copy(1, 7), copy(0, 8)], "h1": [copy(1, 7), copy(1, 8)]}
    assert choose(inventories, hosts_of(2), "run", "a1").step == 8
    inventories[where].append(second)
    chosen = choose(inventories, hosts_of(2), "run", "a1")
    assert chosen.step == 7
    assert chosen.reasons == ("step 8 of attempt 0: copies of shard 1 differ",)


def test_own_and_replica_of_the_same_bytes_are_the_same() -> None:
    own = Version(ShardId("run", "a1", 0), 7, 0, 100, "0" * 16, role="own")
    replica = Version(ShardId("run", "a1", 0), 7, 0, 100, "0" * 16)
    assert choose({"h0": [own], "h1": [replica]}, ["h1"], "run", "a1").versions == (replica,)


def test_holders_share_the_sending() -> None:
    """Eight ranks of a lost host with copies on two others: each sends half the bytes, though sizes differ."""
    shards = [copy(owner, 7, payload_bytes=size) for owner, size in enumerate([10, 80, 30, 40, 20, 60, 70, 50])]
    chosen = choose({"h1": shards, "h2": shards, "new": []}, ["new"] * 8, "run", "a1")
    sent = Counter[str]()
    for source, version in zip(chosen.sources, chosen.versions, strict=True):
        sent[source] += version.payload_bytes
    assert sent == {"h1": 180, "h2": 180}
    bound = [*shards[:4], copy(9, 7)]
    chosen = choose({"h1": bound, "h2": shards, "new": []}, ["new"] * 8, "run", "a1")
    assert chosen.sources[4:] == ("h2",) * 4
    assert chosen.sources[:4] == ("h1",) * 4, "h2 alone has the others"


def test_one_outside_of_the_job_sends_what_nobody_inside_has() -> None:
    inventories = {"a": [copy(0, 7), copy(1, 7)], "h1": [copy(1, 7)], "h2": [copy(1, 7), copy(2, 7)]}
    assert choose(inventories, ["h0", "h0", "h2"], "run", "a1").sources == ("a", "h2", "h2")


def test_a_holder_that_is_gone_is_said() -> None:
    chosen = choose({"h0": [copy(0, 7), copy(1, 7)]}, hosts_of(2), "run", "a1")
    assert (chosen.step, chosen.sources) == (7, ("h0", "h0"))
    assert chosen.reasons == ("holder h1 gave no inventory",)


def test_nothing_at_all() -> None:
    assert choose({"h0": []}, ["h0"], "run", "a1").step is None
    assert choose({}, ["h0"], "run", "a1").reasons == ("holder h0 gave no inventory",)


def test_a_holder_full_of_old_runs_does_not_fill_the_log() -> None:
    rubbish = [copy(0, 1, run_id=f"run {number}") for number in range(1000)]
    chosen = choose({"h0": [*rubbish, copy(0, 7)]}, ["h0"], "run", "a1")
    assert chosen.step == 7
    assert len(chosen.reasons) == MAX_REASONS + 1
    assert chosen.reasons[-1] == "and 980 reasons more"
    missing = choose({"h0": [copy(0, 7)]}, ["h0"] * 100, "run", "a1")
    assert missing.reasons[0].endswith("shard 1, 2, 3, 4, 5, 6, 7, 8 and 91 more")


COPIES = st.builds(copy, st.integers(0, 3), st.integers(0, 3), st.integers(0, 1), st.integers(0, 2))


@given(st.dictionaries(st.sampled_from(hosts_of(4)), st.lists(COPIES, max_size=8)), st.randoms(use_true_random=False))
def test_the_order_in_which_inventories_come_is_of_no_matter(inventories: Inventories, random: Random) -> None:
    """All ranks decide alike; and whatever is decided holds."""
    chosen = choose(inventories, hosts_of(3), "run", "a1")
    names = random.sample(list(inventories), len(inventories))
    shuffled = {name: random.sample(inventories[name], len(inventories[name])) for name in names}
    assert choose(shuffled, hosts_of(3), "run", "a1") == chosen
    if chosen.step is None:
        return
    for owner, (source, version) in enumerate(zip(chosen.sources, chosen.versions, strict=True)):
        assert version in inventories[source]
        assert (version.shard.owner, version.step, version.attempt) == (owner, chosen.step, chosen.attempt)
    assert all(one.step == other.step for one, other in pairwise(chosen.versions))


def test_ranks_that_differ_go_back_to_where_they_were_the_same() -> None:
    """If there is such a step, complete; else, or if there is nothing to compare, the newest is taken."""

    def held_alike(alike: dict[int, str]) -> Inventories:
        made: Inventories = {"h0": [], "h1": []}
        for step, digests in alike.items():
            for owner, digest in enumerate(digests):
                made[f"h{owner}"].append(replace(copy(owner, step), shared="" if digest == "-" else digest * 16))
        return made

    for alike, step, certified in (
        ({6: "aa", 7: "bb"}, 7, True),
        ({6: "aa", 7: "bc"}, 6, True),
        ({6: "ab", 7: "bc"}, 7, False),
        ({6: "aa", 7: "--"}, 7, None),
        ({6: "--", 7: "ab"}, 7, False),
        ({5: "aa", 6: "--", 7: "ab"}, 7, False),
        ({5: "aa", 6: "ab", 7: "ab"}, 5, True),
        ({6: "aa", 7: "a-"}, 6, True),
        ({6: "a", 7: "bc"}, 7, False),
    ):
        chosen = choose(held_alike(alike), hosts_of(2), "run", "a1")
        assert (chosen.step, chosen.certified) == (step, certified), alike
        newest = choose(held_alike(alike), hosts_of(2), "run", "a1", compares=False)
        assert newest.step == max(step for step, digests in alike.items() if len(digests) == 2), "meant to differ"
    assert "states of ranks differ" in choose(held_alike({6: "aa", 7: "bc"}), hosts_of(2), "run", "a1").reasons[0]
    assert choose(held_alike({7: "a"}), ["h0"], "run", "a1").certified is None, "there is nobody to compare with"


@given(st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=6))
def test_certified_goes_before_newer_and_else_the_newest_does(verdicts: list[bool | None]) -> None:
    """Where ranks were not compared, newer versions in which they differ are no sign of corruption."""
    first = next((index for index, verdict in enumerate(verdicts) if verdict is not False), 0)
    expected = first if verdicts[first] else 0
    assert preferred(range(len(verdicts)), verdicts.__getitem__) == expected
    assert preferred([], verdicts.__getitem__) is None


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.usefixtures("one_rank")
def test_what_the_disk_does_not_say_is_not_certified(compares: bool) -> None:
    """But where ranks are not to be alike, and of a checkpoint of one rank, there is nothing to certify."""
    training = TrainingState(torch.nn.Linear(3, 2), compares=compares)
    restorer = cast(Restorer, SimpleNamespace(_training=training, _group=dist.group.WORLD))
    said: list[tuple[dict[str, Any], bool | None]] = [({"certified": True}, True), ({"certified": None}, None)]
    said += [({}, False)] + [({"certified": each}, False) for each in (False, 1, 0, "true", [True], {})]
    for told, certified in said:
        expected = certified if compares or certified else None
        assert Restorer._are_certified(restorer, [{"world_size": 2, **told}]) == [expected]
        assert Restorer._are_certified(restorer, [{"world_size": 1, **told}]) == [None]
