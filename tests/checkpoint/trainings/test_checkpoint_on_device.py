"""Checkpoints of a state on a device, which is simulated: no version has parts of two steps, and few launches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from simgpu import World, capturing, peek, simulated
from thinwire.checkpoint.agreement import Agreement, Turn
from thinwire.checkpoint.copier import LATER_BYTES, Copier, Target
from thinwire.checkpoint.cycle import Cycle
from thinwire.checkpoint.pacing.governor import Governor
from thinwire.checkpoint.records import Notices
from thinwire.checkpoint.state.encode import Encoded, StateEncoder
from thinwire.checkpoint.state.layout import view_of
from thinwire.checkpoint.state.snapshot import TrainingState, random_states, set_random_states

WIDTH = LATER_BYTES // 4  # a parameter that is copied beside the training


class Holder:
    """The part of an agreement that a cycle needs: one rank, with a slot for each version, and what was published."""

    obstacle = refusal = ""
    sizes = 0, 0
    is_registered = True

    def __init__(self) -> None:
        self.published: dict[int, dict[str, bytes]] = {}
        self.may_copy = threading.Event()
        self.may_copy.set()

    def take_turn(self, step: int) -> Turn:
        self.may_copy.wait()
        payload = memoryview(bytearray(max(self.sizes[0], 4 << 20)))
        return Turn(writer=cast(Any, SimpleNamespace(payload=payload, common=None, step=step)), stride=1)

    def target(self, writer: Any, encoded: Encoded) -> Target:
        return Target(writer.payload)

    def publish(self, writer: Any, encoded: Encoded, crcs: object) -> str:
        self.published[writer.step] = {
            item.path: bytes(writer.payload[item.offset : item.offset + item.nbytes]) for item in encoded.slices
        }
        return ""

    def abandon(self, writer: object) -> None:
        raise AssertionError("nothing fails here")

    persist = lambda self, step, reason="": None  # noqa: E731
    wait_until_sent = lambda self, needed: False  # noqa: E731


class Training:
    """Steps of a model on a device and the checkpoint after each. ``expected`` are the parameters after each step."""

    def __init__(self, world: World, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
        self.world = world
        self.model = nn.Sequential(nn.Linear(WIDTH, 1), nn.BatchNorm1d(3)).to("cuda")
        self.optimizer = optimizer(self.model.parameters(), lr=0.1, **options)
        self.holder, self.notices = Holder(), Notices(rank=0)
        self.expected: dict[int, dict[str, bytes]] = {}

    def begin(self, overlap: bool = True) -> None:
        agreement = cast(Agreement, self.holder)
        state = TrainingState(self.model, self.optimizer)
        self.cycle = Cycle(state, agreement, self.notices, Governor(), overlap)
        self.cycle.started = True

    def eager_step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def replay(self) -> None:
        """What the replay of a captured step does: it writes, calls no hook, and torch counts no version."""
        for parameter in self.model.parameters():
            parameter.data.sub_(0.1)

    def checkpoint(self) -> None:
        self.cycle.checkpoint()
        state = {f"model.{name}": peek(tensor) for name, tensor in self.model.state_dict().items()}
        self.expected[self.cycle.step] = {name: tensor.numpy().tobytes() for name, tensor in state.items()}

    def check(self) -> None:
        self.cycle.close()
        assert self.world.races == []
        assert self.world.errors == []
        assert self.holder.published.keys() == self.expected.keys()
        for step, payload in self.holder.published.items():
            assert {path: payload[path] for path in self.expected[step]} == self.expected[step], f"step {step}"


@pytest.fixture
def world() -> Iterator[World]:
    with simulated() as world:
        yield world


def test_steps_that_come_through_the_hook_are_copied_beside_the_training(world: World) -> None:
    training = Training(world, torch.optim.SGD, momentum=0.9)
    training.begin()
    for _ in range(4):
        training.eager_step()
        training.checkpoint()
        assert training.cycle._copying is not None, "the next step waits for it, and this one does not"
    training.check()
    assert training.notices.last == ""


@pytest.mark.slow
@pytest.mark.parametrize("warm_ups", [0, 2])
def test_replays_of_a_step_that_was_captured_tear_no_version(world: World, warm_ups: int) -> None:
    training = Training(world)
    training.begin()
    for _ in range(warm_ups):
        training.eager_step()
        training.checkpoint()
    training.model.zero_grad()
    with capturing():
        training.optimizer.step()
    assert "CUDA graph" in training.notices.last
    for _ in range(3):
        training.replay()
        training.checkpoint()
    training.check()


def test_replays_of_a_step_that_was_captured_before_the_checkpointer_tear_no_version(world: World) -> None:
    training = Training(world)
    training.begin()
    for _ in range(3):
        training.replay()
        training.checkpoint()
    training.check()


def test_of_two_optimizers_one_may_be_in_a_graph(world: World) -> None:
    training = Training(world)
    other = nn.Linear(WIDTH, 1).to("cuda")
    captured = torch.optim.SGD(other.parameters(), lr=0.1)
    training.model.add_module("other", other)
    state = TrainingState(training.model, [training.optimizer, captured])
    training.begin()
    training.cycle = Cycle(state, cast(Agreement, training.holder), training.notices, Governor(), True)
    training.cycle.started = True
    for _ in range(3):
        training.eager_step()
        for parameter in other.parameters():
            parameter.data.sub_(0.1)
        training.checkpoint()
        for parameter in other.parameters():  # another replay, before the hook of the other one
            parameter.data.sub_(0.1)
    training.check()


def test_a_capturable_optimizer_is_taken_for_captured(world: World) -> None:
    training = Training(world, torch.optim.Adam, capturable=True)
    training.begin()
    assert "capturable" in training.notices.last
    for _ in range(3):
        training.eager_step()
        training.checkpoint()
        training.replay()
    training.check()


def test_small_tensors_are_gathered_in_a_few_launches(world: World) -> None:
    """Of all dtypes, shapes and strides. A clone of each would be 300 launches, and as many copies to the host."""
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)
    state: dict[str, Tensor] = {
        str(number): torch.randint(0, 2, (number % 7, 3), device="cuda").to(dtypes[number % 5]) for number in range(300)
    }
    state["large"] = torch.randn(WIDTH + 5, device="cuda")
    state["turned"] = torch.randn(5, 3, device="cuda").t()
    state["scalar"] = torch.tensor(1.5).to("cuda")
    copier, encoder = Copier(lambda where, tensor: True), StateEncoder()
    encoded = encoder.encode(state)
    payload = memoryview(bytearray(encoded.payload_bytes))
    expected = [peek(tensor) for tensor in encoded.tensors]
    before = sum(world.launches.values())
    copy = copier.begin(encoded, Target(payload))
    assert sum(world.launches.values()) - before < 10
    for tensor in state.values():
        if tensor.nbytes < LATER_BYTES:
            tensor.zero_()  # it may be written to from now on
    before = sum(world.launches.values())
    assert copy.finish()
    assert sum(world.launches.values()) - before < 10
    assert world.races == []
    with world.blind():
        for where, tensor in zip(encoded.slices, expected, strict=True):
            assert torch.equal(view_of(payload, where), tensor), where.path


def test_the_random_state_is_that_of_the_devices_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {number: torch.full((16,), number, dtype=torch.uint8) for number in range(3)}
    with simulated(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_rng_state", lambda device: states[device.index])
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device.index: state}))
        model = nn.Linear(2, 2).to("cuda:1")
        saved = TrainingState(model).capture(1)["random"]
        assert saved["cuda"].unique().tolist() == [1], "the current device is 0"
        two = random_states([torch.device("cuda", 1), torch.device("cuda", 2)])
        set_random_states(two, [torch.device("cuda", 0), torch.device("cuda", 1)])
    assert [states[number].tolist() for number in range(3)] == [[1] * 16, [2] * 16, [2] * 16]


@pytest.mark.parametrize(("saved", "here"), [(1, 2), (2, 1), (3, 2)])
def test_the_random_states_of_more_or_fewer_devices_are_restored_as_far_as_there_are_any(
    saved: int, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is spread over other devices than before is restored: bytes of one state were cut into two."""
    states = {number: torch.full((16,), number, dtype=torch.uint8) for number in range(3)}

    def set_state(state: Tensor, device: torch.device) -> None:
        assert state.numel() == 16, "RNG state is wrong size"
        states[device.index] = state

    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device.index])
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_state)
    devices = [torch.device("cuda", number) for number in range(3)]
    before = random_states(devices[:saved])
    states.update({number: torch.full((16,), 9, dtype=torch.uint8) for number in range(3)})
    set_random_states(before, devices[:here])
    kept = min(saved, here)
    assert [states[number][0].item() for number in range(3)] == [*range(kept), *[9] * (3 - kept)]
