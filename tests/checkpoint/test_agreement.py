"""A rank whose parameters are not those of the others is found and named, and nobody else is."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thinwire.checkpoint.agreement import Agreement, Divergence
from thinwire.checkpoint.copier import Copier, Target
from thinwire.checkpoint.records import Notices
from thinwire.checkpoint.state.encode import StateEncoder
from thinwire.checkpoint.state.layout import StateLayout
from thinwire.checkpoint.state.snapshot import TrainingState


def told(comparison: Divergence, *digests: tuple[int, ...], first: int = 1) -> list[bool]:
    """Each step, all ranks tell of it and of the one before."""
    before, found = (0,) * len(digests[0]), []
    for step, now in enumerate(digests, first):
        ranks = zip(before, now, strict=True)
        found.append(comparison.compare([[step - 1 if old else 0, old, step, new] for old, new in ranks]))
        before = now
    return found


SAME = [(5,) * 4, (6,) * 4, (7,) * 4]


@pytest.mark.parametrize(
    ("digests", "ranks", "words"),
    [
        ((8, 8, 9, 8), (2,), "state of rank 2 differ from the other ranks at step 4, and at step 3 all"),
        ((8, 9, 10, 8), (1, 2), "of ranks 1, 2 differ from the other"),
        ((8, 8, 9, 9), (0, 1, 2, 3), "of ranks 0, 1, 2, 3 differ from each other"),
        ((8, 9, 10, 11), (0, 1, 2, 3), "from each other"),
    ],
)
def test_the_minority_is_named(digests: tuple[int, ...], ranks: tuple[int, ...], words: str) -> None:
    comparison = Divergence()
    assert told(comparison, *SAME, digests, digests) == [False, False, False, True, False], "said once"
    assert (comparison.diverged, comparison.certified) == (ranks, 3)
    assert words in comparison.text


def test_of_two_both_are_named() -> None:
    comparison = Divergence()
    told(comparison, (5, 5), (6, 6), (7, 7), (8, 9))
    assert comparison.diverged == (0, 1)


@given(st.lists(st.tuples(*[st.integers(1, 2)] * 4), max_size=6))
def test_ranks_that_differ_from_the_first_on_are_left_alone(later: list[tuple[int, ...]]) -> None:
    """They train by local steps, or parts of one model: at times they may be the same by accident. It is said once,
    with what settles it."""
    comparison = Divergence()
    assert told(comparison, (8, 8, 9, 8), *SAME, *later) == [True] + [False] * (3 + len(later))
    assert (comparison.is_off, comparison.diverged, comparison.certified) == (True, (), -1)
    for words in ("of rank 2 differ from the other ranks", "at step 1", "on_divergence='off'"):
        assert words in comparison.text


@given(st.integers(1, 4), st.integers(-1, 9))
def test_once_the_same_is_enough(same: int, restored: int) -> None:
    """A flip before the fourth comparison ended the comparison for good, and so did one right after a restart."""
    comparison = Divergence(certified=restored)
    alike = [(5, 5), (6, 6), (7, 7), (8, 8)][: same if restored < 0 else same - 1]
    assert told(comparison, *alike, (8, 9), first=10) == [False] * len(alike) + [True]
    assert (comparison.is_off, comparison.diverged) == (False, (0, 1))
    assert f"at step {9 + len(alike) if alike else restored} all were the same" in comparison.text


def test_no_step_is_left_out() -> None:
    """Where the first comparison sees two steps, the first one may be the last at which all were the same."""
    comparison = Divergence()
    assert comparison.compare([[1, 5, 2, 6], [1, 5, 2, 7]])
    assert (comparison.certified, comparison.diverged, comparison.is_off) == (1, (0, 1), False)


def test_steps_that_not_all_have_wait() -> None:
    """A rank whose digest is late is no rank that differs."""
    comparison = Divergence()
    assert told(comparison, *SAME) == [False] * 3
    assert not comparison.compare([[3, 7, 4, 8], [2, 6, 3, 7]])
    assert not comparison.compare([[4, 8, 5, 9], [0, 0, 0, 0]])
    assert comparison.certified == 3
    assert comparison.compare([[4, 8, 5, 9], [3, 7, 4, 1]]), "step 4"
    assert comparison.diverged == (0, 1)


def test_nothing_is_compared_without_digests_or_others() -> None:
    for digests in ((0, 0), (5,)):
        comparison = Divergence()
        assert not any(told(comparison, *[digests] * 5))
        assert comparison.certified == -1


def test_what_ranks_share_comes_first_and_nothing_between_it_is_left_over() -> None:
    """Buffers, random states and the rest have bytes behind it; the gaps for alignment are cleared in a used slot."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    training = TrainingState(model, optimizer, data=nn.Linear(2, 2))
    encoded = StateEncoder(training.is_replicated).encode(training.capture(1))
    layout = StateLayout.from_bytes(encoded.to_bytes())
    assert StateLayout.from_bytes(layout.to_bytes()) == layout
    shared = {where.path for where in layout.slices if where.offset < layout.shared_bytes}
    names = [name for name, _ in model.named_parameters()]
    moments = [f"optimizer.state.{i}.{name}" for i in range(4) for name in ("step", "exp_avg", "exp_avg_sq")]
    assert shared == {f"model.{name}" for name in names} | set(moments)
    slots = []
    for left_over in (b"\0", b"\xff"):
        slot = bytearray(left_over * (encoded.payload_bytes + 100))
        copy = Copier(lambda where, tensor: True).begin(encoded, Target(memoryview(slot)))
        assert copy.finish()
        slots.append(bytes(slot[: encoded.payload_bytes]))
    assert slots[0] == slots[1]


def test_ranks_that_need_whole_states_and_do_not_fit_are_told_what_to_give_the_holder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They differ from the first comparison on, so what was kept once is kept with each: training goes on."""
    monkeypatch.setattr("thinwire.checkpoint.agreement.gather_json", lambda value, group: [value, ("other", 7)])
    registration, notices = Mock(), Notices(0)
    registration.shortage.return_value = "Start the holder with --memory-budget=123 or more"
    registration.register.side_effect = ValueError("no room")
    agreement = Agreement(registration, Mock(), None, Mock(), notices)
    agreement.divergence.is_off, agreement.keep = True, 1
    assert not agreement.register(2, None)
    assert notices.last == "no slots for checkpoints: Start the holder with --memory-budget=123 or more"
    assert registration.register.call_args.args[2] == [(0, 0), (1, 0)], "nothing is kept once any more"
    agreement.keep = -1
    with pytest.raises(ValueError, match="there can be no checkpoints: Start the holder"):
        agreement.register(3, None)
